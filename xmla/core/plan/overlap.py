"""Which launches of a plan may start before the one before them has ended (core/lang/launches.py)."""

from xmla.core.call import Problem
from xmla.core.values import Device


def overlap_limit(problem: Problem, device: Device, *early: str) -> int:
    """OVERLAP_LIMIT of a kernel that reads the arguments `early` before it waits for earlier launches.

    If one of these writes such an argument the launch takes its turn.
    """
    return 0 if problem.written.intersection(early) else device.overlap_limit
