"""Tensors of a Gluon kernel as NumPy arrays, with the dtypes, promotions and 32-bit arithmetic of Triton.

A tensor is its values by index. Layouts say which thread holds a value, not which value it is, so they are not
followed, but by PTX that takes several elements of a thread at once: from `arange` and `full` through arithmetic,
`where` and loads.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from triton.experimental.gluon import language as gl

NUMPY: dict[Any, np.dtype] = {
    gl.int1: np.dtype(np.bool_),
    gl.int8: np.dtype(np.int8),
    gl.uint8: np.dtype(np.uint8),
    gl.int16: np.dtype(np.int16),
    gl.uint16: np.dtype(np.uint16),
    gl.int32: np.dtype(np.int32),
    gl.uint32: np.dtype(np.uint32),
    gl.int64: np.dtype(np.int64),
    gl.uint64: np.dtype(np.uint64),
    gl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    gl.float16: np.dtype(np.float16),
    gl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    gl.float32: np.dtype(np.float32),
}


def numpy_of(dtype: Any) -> np.dtype:
    """The dtype in NumPy; of pointers that of addresses."""
    return np.dtype(np.int64) if dtype.is_ptr() else NUMPY[dtype]


class _Layout:
    """What kernels ask of a tensor's type: its layout, and of that the parent; any of them, since none is followed."""

    @property
    def layout(self) -> "_Layout":
        return self

    parent = tensor_type = layout


class Tensor:
    """Values of a dtype; of a pointer type they are addresses. `layout`: of accumulators, and of what PTX takes."""

    __slots__ = ("data", "dtype", "layout")
    type = _Layout()

    def __init__(self, data: Any, dtype: Any, layout: Any = None) -> None:
        self.data = np.asarray(data, numpy_of(dtype))
        self.dtype = dtype
        self.layout = layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> "Tensor":
        return Tensor(-self.data, self.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        if bitcast:
            return Tensor(self.data.view(numpy_of(dtype)), dtype, self.layout)
        data = self.data
        if self.dtype.is_floating() and not dtype.is_floating():
            data = np.trunc(data.astype(np.float32))
        elif self.dtype.is_floating() and self.dtype.primitive_bitwidth < 32:
            data = data.astype(np.float32)
        return Tensor(data.astype(NUMPY[dtype]), dtype, self.layout)

    def permute(self, order: Sequence[int]) -> "Tensor":
        return Tensor(self.data.transpose(order), self.dtype)


def tensor(value: Any, dtype: Any = None) -> Tensor:
    """A tensor as it is; of a Python number a scalar of `dtype`, else of 32 bits."""
    if isinstance(value, Tensor):
        return value
    kinds = {bool: gl.int1, int: gl.int32, float: gl.float32}
    return Tensor(value, dtype or kinds[type(value)])


def _wider(a: Any, b: Any) -> Any:
    """The dtype of an operation on tensors of two dtypes."""
    if a.is_floating() != b.is_floating():
        return a if a.is_floating() else b
    if a.primitive_bitwidth != b.primitive_bitwidth:
        return max(a, b, key=lambda dtype: dtype.primitive_bitwidth)
    if a.is_floating():
        return a if a == b else gl.float32
    return b if a.is_int_signed() else a


def unified(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """The operands in one dtype. A Python number takes the tensor's, unless that has no such numbers."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = tensor(a, gl.float32 if isinstance(b, float) else None)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        dtype = _wider(a.dtype, b.dtype)
    else:
        dtype, number = (a.dtype, b) if isinstance(a, Tensor) else (b.dtype, a)
        if isinstance(number, float) and not dtype.is_floating():
            dtype = gl.float32
        elif dtype == gl.int1 and not isinstance(number, bool):
            dtype = gl.int32
    cast = (x if isinstance(x, Tensor) and x.dtype == dtype else tensor(x, dtype).to(dtype) for x in (a, b))
    first, second = cast
    return first, second


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The quotient of integers, rounded towards zero."""
    return (a - np.fmod(a, b)) // b


def layout_of(a: Any, b: Any) -> Any:
    """The layout of what is computed of two operands: that of either which is known."""
    return next((x.layout for x in (a, b) if isinstance(x, Tensor) and x.layout is not None), None)


def _operators(function: Callable[..., Any], result: Any = None) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def forward(a: Tensor, b: Any) -> Tensor:
        if a.dtype.is_ptr():
            step = a.dtype.element_ty.primitive_bitwidth // 8
            return Tensor(function(a.data, tensor(b).data.astype(np.int64) * step), a.dtype, layout_of(a, b))
        x, y = unified(a, b)
        return Tensor(function(x.data, y.data), result or x.dtype, layout_of(a, b))

    def reflected(a: Tensor, b: Any) -> Tensor:
        y, x = unified(a, b)
        return Tensor(function(x.data, y.data), result or x.dtype, layout_of(b, a))

    return forward, reflected


for _name, _function in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "floordiv": divide, "mod": np.fmod,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "lshift": np.left_shift,
    "rshift": np.right_shift,
}.items():  # fmt: skip
    _forward, _reflected = _operators(_function)
    setattr(Tensor, f"__{_name}__", _forward)
    setattr(Tensor, f"__r{_name}__", _reflected)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tensor, f"__{_name}__", _operators(getattr(operator, _name), gl.int1)[0])
