"""XMLA_CHECK=1: check every index, page and length of a call against its limits, before anything is launched.

The kernels silently skip values that are out of range, as the contract says; a debug run needs to know their origin.
"""

from dataclasses import dataclass

import numpy as np

from xmla.core.call import Arrays
from xmla.core.debug.reproducer import has_tokens, save, shrink
from xmla.core.errors import ArgumentError
from xmla.core.op import Op
from xmla.core.values import Attributes, Device, Spec


@dataclass(frozen=True, slots=True)
class Violation:
    """The first value out of its limits, in words, and the tokens whose row holds it (None: no token's row does)."""

    message: str
    rows: np.ndarray | None


def find_violation(op: Op, arrays: Arrays, attrs: Attributes) -> Violation | None:
    """The first value out of its limits: tensor, row, column, value, limit."""
    problem = op.bind({name: Spec.of_numpy(array) for name, array in arrays.items()}, attrs)
    for limit in op.limits(problem, arrays):
        array = arrays[limit.argument]
        where = np.ones(array.shape, bool) if limit.where is None else limit.where
        bad = where & (repeated(array, where) if limit.distinct else (array < limit.low) | (array > limit.high))
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            expected = "expected distinct ones" if limit.distinct else f"limit [{limit.low}, {limit.high}]"
            count = f"{int(bad.sum())} of {array.size} elements"
            wrong = f"{count} stand before" if limit.distinct else f"{count} are out of it"
            message = f"{op.name}: {limit.argument}{list(place)} is {array[place]}, {expected} ({wrong})"
            rows = np.flatnonzero(where & (array == array[place])) if limit.distinct else np.array(place[:1])
            return Violation(message, rows if has_tokens(op, limit.argument) else None)
    return None


def repeated(array: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Which elements from 0 on stand at an earlier place, too, of those at `where`."""
    places = np.flatnonzero(where & (array >= 0))
    _, first = np.unique(array.reshape(-1)[places], return_index=True)
    again = np.zeros(array.size, bool)
    again[np.delete(places, first)] = True
    return again.reshape(array.shape)


def check_values(op: Op, arrays: Arrays, attrs: Attributes, device: Device) -> None:
    """Refuse a call on `device` with a value out of its limits, and save the call to a file.

    Raises:
        ArgumentError: A value is out of its limits; the message ends with the command that repeats the call.
    """
    violation = find_violation(op, arrays, attrs)
    if violation is not None:
        small, _ = shrink(op, arrays, violation.rows, lambda array, places: array if places is None else array[places])
        strides = {name: Spec.of_numpy(array).strides for name, array in arrays.items()}
        repeat = save("XMLA_CHECK", op.name, small, attrs._asdict(), violation.message, strides, device.name)
        raise ArgumentError(f"{violation.message}; {repeat}")
