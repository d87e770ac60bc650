"""Declared values by name and type: an op's attributes and a configuration's fields."""

import types
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

import numpy as np

from xmla.core.errors import ArgumentError
from xmla.core.values.sizes import Size

# A call's attributes, as `Op.attributes` makes them: a named tuple, whose class differs from op to op.
Attributes = Any

LARGEST_FACTOR = 2.0**126  # kernels take the float32 of a factor, and of a factor times log2(e)
SMALLEST_FACTOR = 2.0**-126  # a number between it and 0 is no normal float32: Triton computes in float64 with it


@dataclass(frozen=True, slots=True)
class Attr:
    """A number, flag or string, or with `many` a tuple of them, of any length or as many as `length` says."""

    name: str
    type: type
    optional: bool
    default: object
    many: bool = False
    length: int | None = None

    @classmethod
    def of(cls, name: str, annotation: Any, default: object) -> "Attr":
        members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
        (kind,) = (member for member in members if member is not type(None))
        many = get_origin(kind) is tuple
        elements = get_args(kind)
        length = len(elements) if many and ... not in elements else None
        return cls(name, elements[0] if many else kind, type(None) in members, default, many, length)

    def plain(self, owner: str, value: Any) -> Any:
        """`value` in Python's own type. A NumPy scalar or an array without axes is taken as the value that it holds.

        Raises:
            ArgumentError: The value does not have the declared type or length, or is a float that kernels cannot hold.
        """
        if value is None and self.optional:
            return None
        if not self.many:
            return self._one(owner, value)
        if not isinstance(value, tuple | list):
            expected = f"a tuple of {self.type.__name__}"
            raise ArgumentError(f"{owner}: {self.name} type is {type(value).__name__}, expected {expected}")
        if self.length is not None and len(value) != self.length:
            raise ArgumentError(f"{owner}: {self.name} has length {len(value)}, expected {self.length}")
        return tuple(self._one(owner, element) for element in value)

    def _one(self, owner: str, value: Any) -> Any:
        type_name = type(value).__name__
        # A trace's, or torch.compile's, of a framework that is not imported here.
        if self.type is int and (type(value) is Size or type_name == "SymInt"):
            return value
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
            value = value.item()
        accepted = (int, float) if self.type is float else (self.type,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.type is not bool):
            raise ArgumentError(f"{owner}: {self.name} type is {type_name}, expected {self.type.__name__}")
        if self.type is not float:
            return value
        if not -LARGEST_FACTOR <= value <= LARGEST_FACTOR:  # unlike isfinite, torch.compile traces this
            beyond = isinstance(value, int) or abs(value) < float("inf")  # not NaN either
            got = f"2**{value.bit_length() - 1} or more" if isinstance(value, int) else value
            expected = f"a number from {-LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}" if beyond else "a finite number"
            raise ArgumentError(f"{owner}: {self.name} value is {got}, expected {expected}")
        return value if abs(value) >= SMALLEST_FACTOR else 0.0  # without a sign: memos take 0.0 for −0.0
