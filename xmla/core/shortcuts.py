"""Shortcuts through Triton's interpreter: the same bits in a quarter of the time.

Of an interpreted operation NumPy takes a tenth. In the rest the interpreter works out again what it has worked out
before: types of the same shape, NumPy's dtype of a type, that operands of one type need neither a cast nor a broadcast;
and of every sum and product of integers whether it overflows, in int64, for an assertion that is off. While a plan runs
(`xmla.core.interpreter.corrected`), the functions below stand in for Triton's. tests/core/test_interpreter.py compares.
"""

from functools import cache
from math import copysign
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

_get_np_dtype = interpreter._get_np_dtype
_init_block_type = tl.block_type.__init__

# By the names of types, whose own hash and comparison are in Python.
_dtypes: dict[str, np.dtype] = {}
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[str, tuple[Any, Any]] = {}

# The numbers of each type whose operands are computed in it, whatever the operation.
_RANGES: dict[Any, tuple[float, float]] = {kind.name: (-np.inf, np.inf) for kind in (tl.float32, tl.float64)}
for _kind in (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64):
    _RANGES[_kind.name] = np.iinfo(_get_np_dtype(_kind)).min, np.iinfo(_get_np_dtype(_kind)).max


def _np_dtype(kind: Any) -> np.dtype:
    if kind.name not in _dtypes:
        _dtypes[kind.name] = _get_np_dtype(kind)
    return _dtypes[kind.name]


def _init_block(block: Any, element: Any, shape: Any) -> None:
    key = element.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if key not in _blocks:
        _init_block_type(block, element, shape)
        _blocks[key] = dict(vars(block))
    vars(block).update(_blocks[key])


def _init_tensor(tensor: Any, handle: TensorHandle, kind: Any) -> None:
    if kind.name not in _shapes:
        sizes = [*map(tl.constexpr, kind.shape)] if kind.is_block() else []
        _shapes[kind.name] = tl.tuple(sizes), tl.constexpr(kind.numel if sizes else 1)
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = _shapes[kind.name]


class _Semantic(TritonSemantic):
    def binary_op_sanitize_overflow_impl(self, lhs: Any, rhs: Any, binary_op: Any) -> None:
        pass  # `device_assert` drops what this computes

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        tensor: Any = tl.tensor
        if type(lhs) is tensor and lhs.dtype.name in _RANGES:
            if type(rhs) is not tensor:
                if _is_number_of(rhs, lhs.dtype):
                    return lhs, _filled(rhs, lhs.type)
            elif lhs.type.name == rhs.type.name:
                return lhs, rhs
        elif type(rhs) is tensor and rhs.dtype.name in _RANGES and _is_number_of(lhs, rhs.dtype):
            return _filled(lhs, rhs.type), rhs
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **kwargs)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            ours, theirs = left.shape.values, right.shape.values
            if ours == theirs:
                return lhs, rhs
            if len(ours) == len(theirs):
                shape = [*map(max, ours, theirs)]
                if all(size in (1, most) for sizes in (ours, theirs) for size, most in zip(sizes, shape, strict=True)):
                    return self._as_broadcast(lhs, shape), self._as_broadcast(rhs, shape)
        elif left.is_block():
            return lhs, self._as_broadcast(rhs, left.shape.values)
        elif right.is_block():
            return self._as_broadcast(lhs, right.shape.values), rhs
        return super().broadcast_impl_value(lhs, rhs)

    def _as_broadcast(self, value: Any, shape: list[int]) -> Any:
        if value.type.is_block() and value.type.shape.values == shape:
            return value
        data = np.empty(shape, value.handle.data.dtype)
        data[...] = value.handle.data
        return tl.tensor(TensorHandle(data, value.dtype), tl.block_type(value.dtype, shape))


def _is_number_of(value: Any, kind: Any) -> bool:
    """Whether `value` is a number that an operation with a tensor of `kind` takes as one of `kind`."""
    low, high = _RANGES[kind.name]
    if type(value) is float:  # some releases make −0.0 a 0.0
        return low <= value <= high == np.inf and (value < 0 or copysign(1, value) > 0)
    return type(value) is int and low <= value <= high


def _filled(value: float, kind: Any) -> Any:
    shape = kind.shape.values if kind.is_block() else (1,)
    return tl.tensor(TensorHandle(np.full(shape, value, _np_dtype(kind)), kind.scalar), kind)


@cache
def _with_semantic(member: Any) -> Any:
    function = getattr(member, "__wrapped__", member)  # without the check that it was given a semantic
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs, _semantic=semantic)

    return call


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(owner, name, _with_semantic(member))


_patch_for = cache(interpreter._patch_lang)


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function without patching Triton's language again.

    The launch has already patched `tl`, which our functions see; Triton's own functions see it under another name,
    which stays patched.
    """
    if function.fn.__module__.startswith("triton."):
        _patch_for(function.fn)
    return function.rewrite()(*args, **kwargs)


SHORTCUTS: tuple[tuple[Any, str, Any], ...] = (
    (interpreter, "_get_np_dtype", _np_dtype),
    (interpreter, "_patch_attr", _patch_attr),
    (interpreter.interpreter_semantic, "__class__", _Semantic),
    (tl.block_type, "__init__", _init_block),
    (tl.tensor, "__init__", _init_tensor),
    (InterpretedFunction, "__call__", _call_device_function),
)
