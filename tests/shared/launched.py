"""What GPUs launch in a call."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.profiler import ProfilerActivity, profile


def launched(function: Callable[[], Any], names: set[str]) -> Counter[int]:
    """How many kernels of these names each GPU runs in a call, the second one."""

    def run() -> None:
        jax.block_until_ready(function())
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)

    run()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        run()
    events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counter(event.device_index for event in events if event.name in names)
