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
    """The first value that breaks a rule, in words, and the tokens whose rows show it (None: no token's row does)."""

    message: str
    rows: np.ndarray | None


def find_violation(op: Op, arrays: Arrays, attrs: Attributes) -> Violation | None:
    """The first value out of its limits, or else that names an entry again: tensor, row, column, value, rule."""
    problem = op.bind({name: Spec.of_numpy(array) for name, array in arrays.items()}, attrs)
    for limit in op.limits(problem, arrays):
        name, outside = limit.argument, limit.violated(arrays[limit.argument])
        if outside.any():
            rule = f"limit [{limit.low}, {limit.high}] ({{}} are out of it)"
            rows = np.argwhere(outside)[0, :1] if has_tokens(op, name) else None
            return Violation(_message(op, name, arrays[name], outside, rule), rows)
    pool_indices = [name for pool in op.pools for name in op.indices_of(pool) if name in arrays]
    for name in (name for name in pool_indices if op.tensors[name].distinct):
        beside = [arrays[n] >= 0 for n in pool_indices if op.tensors[n].axes == op.tensors[name].axes]
        written = np.all(beside, axis=0)  # else the token is skipped
        array, again = arrays[name], repeated(arrays[name], written)
        if again.any():
            rule = "expected distinct ones ({} repeat an earlier one)"
            rows = np.flatnonzero(written & (array == array[again][0]))
            return Violation(_message(op, name, array, again, rule), rows)
    return None


def _message(op: Op, name: str, array: np.ndarray, wrong: np.ndarray, rule: str) -> str:
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    count = f"{int(wrong.sum())} of {array.size} elements"
    return f"{op.name}: {name}{list(place)} is {array[place]}, {rule.format(count)}"


def repeated(array: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Which elements stand at an earlier place, too, of those at `where`."""
    places = np.flatnonzero(where)
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
