"""What GPUs launch in a call."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.profiler import ProfilerActivity, profile

from xmla.core.plan import Plan

PAUSE = 0.02  # s around a call: a profiler whose clock is not the GPU's leaves out what is near its ends
PROFILES = 5


def run(function: Callable[[], Any]) -> None:
    jax.block_until_ready(function())
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


def profiled(function: Callable[[], Any]) -> Counter[tuple[int, str]]:
    """How often each GPU runs each kernel in a call, as one profile says."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        time.sleep(PAUSE)
        run(function)
        time.sleep(PAUSE)
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counter((event.device_index, event.name) for event in events)


def check_launches(function: Callable[[], Any], plan: Plan, calls: int, gpus: int = 1) -> list[int]:
    """Compare the kernels that each GPU launches in a call, the second one, with so many calls' of the plan.

    A profile misses events at times, and has none of what did not happen: while it has too few, another is taken, and a
    program that launches too few has none that has enough. Returns the numbers.
    """
    names = {launch.name for launch in plan.active}
    want = Counter(dict.fromkeys(range(gpus), calls * len(plan.active)))
    run(function)
    profiles = []
    for _ in range(PROFILES):
        profiles.append(profiled(function))
        numbers = Counter(gpu for gpu, name in profiles[-1].elements() if name in names)
        if numbers >= want:
            break
    assert numbers == want, f"launches {numbers}, expected {want} of {names}; profiles: {profiles}; {plan}"
    return [numbers[gpu] for gpu in range(gpus)]
