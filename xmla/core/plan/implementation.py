"""Implementations of an op: the calls that each serves, and which one a call takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.plan.plan import Choice, Plan
from xmla.core.values import Device


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition under which an implementation serves a call.

    Attributes:
        supported: The condition in words, for errors and documents.
        unmet: What a call has instead, or None if it meets the condition.
    """

    supported: str
    unmet: Callable[[Problem, Device], str | None]


def on_gpus(*arches: int) -> Condition:
    """The condition that the GPU is of one of these architectures."""
    capabilities = " or ".join(f"{arch // 10}.{arch % 10}" for arch in arches)
    return Condition(
        f"compute capability {capabilities}", lambda _, device: None if device.arch in arches else f"on {device.name}"
    )


ON_HOPPER = on_gpus(90)


@dataclass(frozen=True, slots=True)
class Implementation:
    """Kernels of an op and the calls that they serve: those that meet every condition.

    Attributes:
        name: Its own, in plans.
        asked: What `implementation` asks for; several implementations may have one.
        tokens_a_program: Of ops whose calls are planned in parts: the tokens of a program, by which parts are rounded.
        by_name: Whether only calls that ask for it take it.
    """

    name: str
    plan: Callable[[Problem, Device], Plan]
    conditions: tuple[Condition, ...] = ()
    asked: str = "triton"
    tokens_a_program: Callable[[Problem, Device], int] | None = None
    by_name: bool = False

    def unmet(self, problem: Problem, device: Device) -> tuple[str, str] | None:
        """The first condition that the call does not meet: what the call has, and what is supported."""
        for condition in self.conditions:
            if (got := condition.unmet(problem, device)) is not None:
                return got, condition.supported
        return None


def choose(
    implementations: Sequence[Implementation], problem: Problem, device: Device, asked: str | None
) -> tuple[Implementation, Choice]:
    """The first implementation that serves the call, of those asked for if some were; and why the first.

    Raises:
        UnsupportedError: None of those asked for serves the call. The one that meets most conditions says why, of
            equals the last.
    """
    passed_over: list[tuple[str, str, str]] = []
    nearest = 0, 0
    for implementation in implementations:
        if asked == implementation.asked or (asked is None and not implementation.by_name):
            unmet = implementation.unmet(problem, device)
            if unmet is None:
                return implementation, Choice(problem.op, implementation.name, tuple(passed_over))
            met = [condition.supported for condition in implementation.conditions].index(unmet[1])
            nearest = max(nearest, (met, len(passed_over)))
            passed_over.append((implementation.name, *unmet))
    _, got, supported = passed_over[nearest[1]]
    problem.unsupported("implementation", "value", f"{asked!r} {got}", supported)
