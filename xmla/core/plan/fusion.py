"""Two launches of a plan that become one: a composition lists the pairs that it has a kernel for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xmla.core.plan.plan import Kernel, Launch


@dataclass(frozen=True, slots=True)
class Fusion:
    """What makes one launch of two, one right after the other.

    Attributes:
        first: The kernel of the first launch. One that another fusion makes is recognised too: three become one.
        make: The launch that does the work of both, or None where two are better.
    """

    first: Kernel
    second: Kernel
    make: Callable[[Launch, Launch], Launch | None]


def fuse(launches: Iterable[Launch], fusions: Iterable[Fusion]) -> tuple[Launch, ...]:
    """The launches, with one in the place of each two that a fusion makes one of."""
    makes = {(fusion.first, fusion.second): fusion.make for fusion in fusions}
    fused: list[Launch] = []
    for launch in launches:
        make = makes.get((fused[-1].kernel, launch.kernel)) if fused else None
        if make and (both := make(fused[-1], launch)):
            fused[-1] = both
        else:
            fused.append(launch)
    return tuple(fused)
