"""XMLA_CHECK=1: every index, page and length of a call against its limits, before anything is launched.

The kernels skip what is out of range, silently as the contract says; a debug run wants to know where it came from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xmla.core.errors import ArgumentError
from xmla.core.reproducer import has_tokens, save, shrink
from xmla.core.spec import Spec

if TYPE_CHECKING:
    from xmla.core.op import Op, Problem

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Limit:
    """Elements of `argument` lie in [low, high]; only those `where` counts, if given."""

    argument: str
    low: int
    high: int
    where: np.ndarray | None = None


def paged_limits(problem: "Problem", arrays: Arrays, cache: str = "cache") -> Iterator[Limit]:
    """Limits of a batch over pages: lengths, request ids, and the pages that those lengths reach."""
    pages, entries, _ = problem.specs[cache].shape
    table, lengths = arrays["block_table"], arrays["lengths"]
    yield Limit("lengths", 0, table.shape[1] * entries)
    requests = np.arange(len(lengths)) // max(len(lengths) // max(len(table), 1), 1)
    if "request_ids" in arrays:
        yield Limit("request_ids", -1, len(table) - 1)
        requests = arrays["request_ids"]
    reach = np.zeros(len(table), np.int64)
    known = (requests >= 0) & (requests < len(table))
    np.maximum.at(reach, requests[known], lengths[known])
    yield Limit("block_table", 0, pages - 1, np.arange(table.shape[1]) * entries < reach[:, None])


@dataclass(frozen=True, slots=True)
class Violation:
    """The first value out of its limits, in words, and the tokens whose row holds it (None: no row of a token)."""

    message: str
    rows: np.ndarray | None


def find_violation(op: "Op", arrays: Arrays, attrs: Mapping[str, Any]) -> Violation | None:
    """The first value out of its limits: tensor, row, column, value, limit."""
    problem = op.bind({name: Spec.of_numpy(array) for name, array in arrays.items()}, attrs)
    for limit in op.limits(problem, arrays):
        array = arrays[limit.argument]
        bad = (array < limit.low) | (array > limit.high)
        if limit.where is not None:
            bad &= limit.where
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            message = (
                f"{op.name}: {limit.argument}{list(place)} is {array[place]}, limit [{limit.low}, {limit.high}] "
                f"({int(bad.sum())} of {array.size} elements are out of it)"
            )
            return Violation(message, np.array(place[:1]) if has_tokens(op, limit.argument) else None)
    return None


def check_values(op: "Op", arrays: Arrays, attrs: Mapping[str, Any]) -> None:
    """Refuse a call with a value out of its limits, and keep the call in a file.

    Raises:
        ArgumentError: A value is out of its limits; the message ends with the command that repeats the call.
    """
    found = find_violation(op, arrays, attrs)
    if found is not None:
        small, _ = shrink(op, arrays, found.rows, lambda array, places: array if places is None else array[places])
        strides = {name: Spec.of_numpy(array).strides for name, array in arrays.items()}
        repeat = save("XMLA_CHECK", op.name, small, attrs, found.message, strides)
        raise ArgumentError(f"{found.message}; {repeat}")
