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
BEFORE, AFTER = "FillFunctor<float>", "FillFunctor<int>"  # in the names of torch's kernels around a call
MARKS = 512  # before a call: more than a process takes profiles
PROFILES = 5

Kernels = Counter[tuple[int, str]]  # how often each GPU runs each


def run(function: Callable[[], Any]) -> None:
    jax.block_until_ready(function())
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


def mark(dtype: torch.dtype, count: int) -> None:
    """Run a kernel of torch's so many times on every GPU: BEFORE for float32, AFTER for int32."""
    for gpu in range(torch.cuda.device_count()):
        for _ in range(count):
            torch.full((1,), 1, dtype=dtype, device=f"cuda:{gpu}")


def profiled(function: Callable[[], Any]) -> Kernels:
    """The kernels of a call and of the marks around it, as one profile says."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        time.sleep(PAUSE)
        run(lambda: mark(torch.float32, MARKS))
        run(function)
        run(lambda: mark(torch.int32, 1))
        time.sleep(PAUSE)
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counter((event.device_index, event.name) for event in events)


def whole(kernels: Kernels, gpus: int) -> bool:
    """Whether a profile has marks of both sides of a call on each GPU, and so what ran between them.

    The profiler leaves out what its clock has outside of its time. In a process that has profiled before, CUPTI can
    give the first kernels the times of another clock, and more of them each time. Of a program of few kernels a profile
    then has none.
    """
    marks = {(gpu, side) for gpu, name in kernels for side in (BEFORE, AFTER) if side in name}
    return all((gpu, side) in marks for gpu in range(gpus) for side in (BEFORE, AFTER))


def check_launches(function: Callable[[], Any], plan: Plan, calls: int, gpus: int = 1) -> list[int]:
    """Compare the kernels that each GPU launches in a call, the second one, with so many calls' of the plan.

    The first profile that is whole tells. Returns the numbers.
    """
    names = {launch.name for launch in plan.active}
    want = Counter(dict.fromkeys(range(gpus), calls * len(plan.active)))
    run(function)
    profiles: list[Kernels] = []
    while not (profiles and whole(profiles[-1], gpus)):
        assert len(profiles) < PROFILES, f"no profile has what is around the call; profiles: {profiles}"
        profiles.append(profiled(function))
    numbers = Counter(gpu for gpu, name in profiles[-1].elements() if name in names)
    assert numbers == want, f"launches {numbers}, expected {want} of {names}; profiles: {profiles}; {plan}"
    return [numbers[gpu] for gpu in range(gpus)]
