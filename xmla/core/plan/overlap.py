"""Which launches of a plan may start before the one before them has ended (core/lang/launches.py)."""

from collections.abc import Sequence
from itertools import pairwise

from xmla.core.call import LARGEST_SIZE, Problem
from xmla.core.plan.plan import Launch
from xmla.core.values import Device


def overlap_limit(problem: Problem, device: Device, *early: str) -> int:
    """OVERLAP_LIMIT of a kernel that reads the arguments `early` before it waits for earlier launches.

    If one of these writes such an argument the launch takes its turn.
    """
    return 0 if problem.written.intersection(early) else device.overlap_limit


def overlap_launches(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """The launches of a plan, of which those before one that spreads let it start however many programs they have."""
    limited = [
        launch.overlapped(LARGEST_SIZE) if launch.waits and following.spreads else launch
        for launch, following in pairwise(launches)
    ]
    return (*limited, *launches[len(limited) :])
