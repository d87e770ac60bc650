"""What GPUs launch in a call."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.profiler import ProfilerActivity, profile


def launched(function: Callable[[], Any], names: set[str]) -> Counter[int]:
    """How many kernels of these names each GPU runs in a call, the second one."""
    jax.block_until_ready(function())
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        jax.block_until_ready(function())
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)
    events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counter(event.device_index for event in events if event.name in names)
