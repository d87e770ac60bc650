"""Two launches of a plan that become one: a composition lists the pairs that it has a kernel for."""

from collections.abc import Callable, Iterable, Sequence
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


def fuse(launches: Iterable[Launch], fusions: Sequence[Fusion]) -> tuple[Launch, ...]:
    """The launches, with one in the place of each two that a fusion makes one of."""
    fused: list[Launch] = []
    for launch in launches:
        if fused and (both := _joined(fused[-1], launch, fusions)):
            fused[-1] = both
        else:
            fused.append(launch)
    return tuple(fused)


def _joined(first: Launch, second: Launch, fusions: Sequence[Fusion]) -> Launch | None:
    """The launch that does the work of both, if there is one.

    Kernels are told by identity: a kernel's hash is of its source, which Triton 3.7 cannot read of all of them.
    """
    for fusion in fusions:
        if fusion.first is first.kernel and fusion.second is second.kernel:
            return fusion.make(first, second)
    return None
