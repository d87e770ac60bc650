"""Plans that compute as many tokens at a time as fit a workspace, one part after another in the same buffers.

The launches of a part take `first_row`, the part's first token; of the call's arrays and results they read and write
the rows from there on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from xmla.core.call import Problem
from xmla.core.plan.plan import Plan, all_choices
from xmla.core.values import Spec, cdiv

MAX_PARTS = 1024  # each has two to six launches


def fewest_of_a_part(tokens: int, multiple: int) -> int:
    """The fewest tokens of parts that are a multiple of so many, and not too many."""
    return cdiv(cdiv(tokens, MAX_PARTS), multiple) * multiple


class Rows(NamedTuple):
    """Some rows after one another. Unlike a `range`, these may be sizes of a trace (core/values/sizes.py)."""

    first: int
    count: int


def divided(rows: int, size: int) -> list[Rows]:
    """The parts of so many rows, `size` rows at a time."""
    return [Rows(n * size, min(size, rows - n * size)) for n in range(cdiv(rows, size))]


def in_parts(
    problem: Problem, part: Callable[[int], Plan], row_bytes: int, multiple: int, least: Callable[[int], bool],
    whole: tuple[str, ...] = (),
) -> Plan | None:  # fmt: skip
    """The plan of the largest parts that fit `workspace_bytes`; None if they are too small or too many.

    Args:
        part: The plan of so many tokens.
        row_bytes: At least the bytes that each token of a part needs.
        multiple: Tokens of a part are a multiple of it.
        least: Whether a part of so many tokens is large enough.
        whole: The buffers that are of all tokens.
    """
    tokens, limit = problem["T"], problem.attrs.workspace_bytes
    fewest = fewest_of_a_part(tokens, multiple)
    size = min(tokens, limit // row_bytes) // multiple * multiple
    while size and size >= fewest and least(size):
        parts = Parts.of(problem, part, size, whole)
        needed = parts.workspace_bytes
        if needed <= limit:
            return parts.plan()
        fitting = min(size - 1, size * limit // needed) // multiple * multiple
        # Fewer rows may need less than in proportion: other kernels select in them.
        size = max(fitting, fewest) if size > fewest else 0
    return None


@dataclass(frozen=True, slots=True)
class Parts:
    """A call's parts of `size` tokens, the last of what is left.

    Attributes:
        plans: That of the last part, if there is one, and that of the others, if it is another.
        buffers: Those of all parts, and the results.
    """

    problem: Problem
    size: int
    count: int
    plans: tuple[Plan, ...]
    buffers: Mapping[str, Spec]

    @classmethod
    def of(cls, problem: Problem, part: Callable[[int], Plan], size: int, whole: tuple[str, ...] = ()) -> "Parts":
        """The parts of a call; arguments as of `in_parts`."""
        tokens = problem["T"]
        count = cdiv(tokens, size)
        rest = tokens - (count - 1) * size
        plans = [part(rest)] if count else []
        if count > 1 and rest != size:
            plans.append(part(size))
        buffers: dict[str, Spec] = {}
        for name, spec in (item for plan in plans for item in plan.buffers.items()):
            buffers[name] = max(buffers.get(name, spec), spec, key=lambda spec: spec.nbytes)
        for name in whole:
            buffers[name] = replace(buffers[name], shape=(tokens, *buffers[name].shape[1:]))
        return cls(problem, size, count, tuple(plans), {**buffers, **problem.results})

    @property
    def workspace_bytes(self) -> int:
        return Plan((), self.buffers, tuple(self.problem.results)).workspace_bytes

    def plan(self) -> Plan:
        """The plan that computes one part after the other."""
        in_turn = [self.plans[0] if n == self.count - 1 else self.plans[-1] for n in range(self.count)]
        launches = (
            launch.with_sizes(first_row=n * self.size) for n, plan in enumerate(in_turn) for launch in plan.launches
        )
        return Plan(tuple(launches), self.buffers, tuple(self.problem.results), all_choices(self.plans))
