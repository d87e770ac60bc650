"""Shortcuts through Triton's interpreter: the same bits in a sixth of the time.

Of an interpreted operation NumPy takes a tenth. In the rest the interpreter works out again what it has worked out
before: types of the same shape, NumPy's dtype of a type, that operands of one type need neither a cast nor a broadcast;
and of every sum and product of integers whether it overflows, in int64, for an assertion that is off. While a plan runs
(`xmla.core.compile.interpreter.corrections`), the functions below stand in for Triton's: of an operator whose operands
have types that it has had before NumPy's function is called at once. tests/core/test_interpreter.py compares.
"""

from collections.abc import Callable
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
_choices: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_casts: dict[tuple[str, str], tuple[tuple[Any, ...], np.dtype]] = {}
_roundings: dict[tuple[str, str], tuple[Any, ...]] = {}
_broadcasts: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_fills: dict[tuple[Any, ...], tuple[np.ndarray, tuple[Any, ...]]] = {}

# The numbers of each type whose operands are computed in it, whatever the operation.
_RANGES: dict[Any, tuple[float, float]] = {kind.name: (-np.inf, np.inf) for kind in (tl.float32, tl.float64)}
for _kind in (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64):
    _RANGES[_kind.name] = np.iinfo(_get_np_dtype(_kind)).min, np.iinfo(_get_np_dtype(_kind)).max

# What a cast between these types computes is one function of the builder's.
_ROUNDED = {(kind.name, tl.float32.name) for kind in (tl.float16, tl.bfloat16)}
_ROUNDED |= {(wide, narrow) for narrow, wide in _ROUNDED}


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
        elif type(rhs) is tensor and _is_number_of(lhs, rhs.dtype):
            return _filled(lhs, rhs.type), rhs
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **kwargs)

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.dtype.name, dst_ty.scalar
        if source == target.name:
            return input
        key = input.type.name, target.name
        if (source, target.name) in _ROUNDED and fp_downcast_rounding is None:
            if key not in _roundings:
                _roundings[key] = _like(super().cast(input, dst_ty))
            return _tensor_of(self.builder.cast_impl(input.handle, target).data, _roundings[key])
        if target.name not in _RANGES or source not in (*_RANGES, "int1") or fp_downcast_rounding is not None:
            return super().cast(input, dst_ty, fp_downcast_rounding)
        if key not in _casts:
            _casts[key] = _like(super().cast(input, dst_ty)), _np_dtype(target)
        like, dtype = _casts[key]
        return _tensor_of(input.handle.data.astype(dtype), like)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        tensor: Any = tl.tensor
        kind = x.dtype if type(x) is tensor else y.dtype if type(y) is tensor else tl.void
        data = condition.handle.data, *(_data_of(value, kind) for value in (x, y))
        if condition.dtype.name != "int1" or any(array is None for array in data) or not _alike(*data):
            return super().where(condition, x, y)
        key = condition.type.name, *(value.type.name if type(value) is tensor else "" for value in (x, y))
        if key not in _choices:
            _choices[key] = _like(super().where(condition, x, y))
        return _tensor_of(np.where(*data), _choices[key])

    def full(self, shape: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (int, float):
            return super().full(shape, value, dtype)
        key = *(size.value if isinstance(size, tl.constexpr) else size for size in shape), dtype.name, repr(value)
        if key not in _fills:
            result = super().full(shape, value, dtype)
            _fills[key] = result.handle.data, _like(result)
        data, like = _fills[key]
        return _tensor_of(data.copy(), like)

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
        kind, data = value.type, value.handle.data
        if kind.is_block() and kind.shape.values == shape:
            return value
        # A view of a block and an array of a scalar, as Triton's: sums follow the order of results in memory.
        data = np.broadcast_to(data, shape) if kind.is_block() else np.full(shape, data)
        key = kind.name, *shape
        if key not in _broadcasts:
            _broadcasts[key] = _like(tl.tensor(TensorHandle(data, kind.scalar), tl.block_type(kind.scalar, shape)))
        return _tensor_of(data, _broadcasts[key])


def _is_number_of(value: Any, kind: Any) -> bool:
    """Whether `value` is a number that an operation with a tensor of `kind` takes as one of `kind`."""
    low, high = _RANGES.get(kind.name, (np.inf, -np.inf))
    if type(value) is float:  # some releases make −0.0 a 0.0
        return low <= value <= high == np.inf and (value < 0 or copysign(1, value) > 0)
    return type(value) is int and low <= value <= high


def _data_of(value: Any, kind: Any) -> Any:
    """What an operation computed in `kind` takes of an operand; None for one that it casts."""
    tensor: Any = tl.tensor
    if type(value) is tensor:
        return value.handle.data if value.dtype.name == kind.name and kind.name in _RANGES else None
    return _np_dtype(kind).type(value) if _is_number_of(value, kind) else None


def _alike(*data: Any) -> bool:
    """Whether a result of these lies in memory as Triton's, which takes a scalar beside a block as an array."""
    return len({array.ndim for array in data}) == 1 or all(array.flags.c_contiguous for array in data)


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


def _quotient(dividend: Any, divisor: Any) -> Any:
    return (dividend - np.fmod(dividend, divisor)) // divisor


# What NumPy computes of operands of one type, of which booleans take the bitwise ones alone.
_BITWISE: dict[str, Callable[..., Any]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_COMPUTE: dict[str, Callable[..., Any]] = _BITWISE | {
    "add": np.add, "radd": np.add, "sub": np.subtract, "mul": np.multiply, "rmul": np.multiply, "mod": np.fmod,
    "floordiv": _quotient, "lshift": np.left_shift, "rshift": np.right_shift, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


def _computation(name: str, left: Any, right: Any, result: Any) -> Callable[..., Any] | None:
    """What the operator `name` computes of the data of operands whose elements have these types, and the result's."""
    if name == "add" and left.is_ptr() and right.is_int():
        width = max(1, left.element_ty.primitive_bitwidth // 8)
        return lambda pointers, offsets: pointers + width * np.asarray(offsets).astype(np.uint64)
    if left.name not in _RANGES or right.name not in _RANGES:
        return _BITWISE.get(name) if left.is_int1() and right.is_int1() else None
    of_one_type = left.name == right.name or np.result_type(*map(_np_dtype, (left, right))) == _np_dtype(result)
    return _COMPUTE[name] if of_one_type else None


def _tensor_of(data: np.ndarray, like: tuple[Any, ...]) -> Any:
    """A tensor of data that have the size of its type, as they come from NumPy."""
    handle: Any = object.__new__(TensorHandle)
    result: Any = object.__new__(tl.tensor)
    result.handle, result.type, result.dtype, result.shape, result.numel = handle, *like
    handle.data, handle.dtype, handle.attr = data, result.dtype, {}
    return result


def _like(result: Any) -> tuple[Any, ...]:
    return result.type, result.dtype, result.shape, result.numel


@cache
def _operator(name: str, member: Any) -> Any:
    """An operator of tensors, which is Triton's for the first operands of a pair of types."""
    first = _with_semantic(member)
    compute_known: dict[tuple[str, str], tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    tensor: Any = tl.tensor

    def call(left: Any, right: Any) -> Any:
        if type(right) is tl.constexpr:
            right = right.value
        ours = left.handle.data
        if type(right) is tensor:
            kind, theirs = right.dtype, right.handle.data
            key = left.type.name, right.type.name
            if ours.shape != theirs.shape and not _alike(ours, theirs):
                return first(left, right)
        elif ours.flags.c_contiguous and _is_number_of(right, kind := tl.int32 if left.dtype.is_ptr() else left.dtype):
            theirs = right
            key = left.type.name, ""
        else:
            return first(left, right)
        if known := compute_known.get(key):
            compute, like = known
            return _tensor_of(compute(ours, theirs), like)
        result = first(left, right)
        if compute := _computation(name, left.dtype, kind, result.dtype):
            compute_known[key] = compute, _like(result)
        return result

    return call


@cache
def _cast_method(member: Any) -> Any:
    to, semantic = _with_semantic(member), interpreter.interpreter_semantic

    def call(value: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return to(value, dtype, *args, **kwargs)
        return semantic.cast(value, dtype.value if type(dtype) is tl.constexpr else dtype)

    return call


@cache
def _expand_method(member: Any) -> Any:
    """`x[:, None]`: the shapes that Triton has told before."""
    first = _with_semantic(member)
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def call(value: Any, places: Any) -> Any:
        if type(places) is not tuple or any(place is not None and place != slice(None) for place in places):
            return first(value, places)
        key = value.type.name, *(place is None for place in places)
        if key not in known:
            result = first(value, places)
            if value.type.is_block():
                known[key] = _like(result)
            return result
        return _tensor_of(value.handle.data[places], known[key])

    return call


@cache
def _load(member: Any) -> Any:
    """Loads through pointers, masks and other values of types that have been loaded before."""
    first, semantic = _with_semantic(member), interpreter.interpreter_semantic
    tensor: Any = tl.tensor
    known: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}

    def call(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        if type(pointer) is not tensor or type(mask) is not tensor:
            return first(pointer, mask, other, **options)
        if type(other) is tl.constexpr:
            other = other.value
        key = pointer.type.name, mask.type.name, other.type.name if type(other) is tensor else repr(other)
        if key not in known:
            result = first(pointer, mask, other, **options)
            kind, shape = result.dtype, result.handle.data.shape
            if kind is not pointer.dtype.element_ty or not mask.dtype.is_int1() or _another(other, kind):
                known[key] = None
            else:
                masked = None
                if type(other) is not tensor:
                    number = semantic.cast(semantic.to_tensor(0 if other is None else other), kind)
                    masked = np.full(shape, number.handle.data)
                known[key] = shape, _np_dtype(kind), masked, _like(result)
            return result
        if (facts := known[key]) is None:
            return first(pointer, mask, other, **options)
        shape, dtype, masked, like = facts
        data = pointer.handle.data, mask.handle.data, other.handle.data if masked is None else masked
        whole = (array if array.shape == shape else np.broadcast_to(array, shape) for array in data)
        return _tensor_of(_loaded(dtype, *whole), like)

    return call


_MANY = 1024  # elements from which on NumPy loads them sooner than Triton's function, which takes each by itself
_NOT_LOADED = np.zeros(1, np.uint64)  # where masked pointers point in the meantime


@cache
def _memory(dtype: np.dtype) -> np.ndarray:
    """This process's memory but for its first element, as an array of elements in their places."""
    memory: Any = type("_Memory", (), {})()
    most = (1 << 56) // dtype.itemsize
    memory.__array_interface__ = {"data": (dtype.itemsize, True), "shape": (most,), "typestr": dtype.str, "version": 3}
    return np.asarray(memory)


def _loaded(dtype: np.dtype, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What Triton's `load` gives."""
    if pointers.size >= _MANY:
        addresses = np.where(mask, pointers, _NOT_LOADED.ctypes.data).view(np.int64)
        if not (addresses & (dtype.itemsize - 1)).any():
            values = _memory(dtype).take((addresses >> dtype.itemsize.bit_length() - 1) - 1, mode="clip")
            np.copyto(values, other, where=~mask)
            return values
    return interpreter._interpreter.load(pointers, mask, other, dtype)


def _another(value: Any, kind: Any) -> bool:
    """Whether `value` is a tensor of another type than `kind`."""
    tensor: Any = tl.tensor
    return type(value) is tensor and value.dtype.name != kind.name


@cache
def _dot(member: Any) -> Any:
    """Products of tiles of types that have been multiplied before, summed in float32."""
    first, builder = _with_semantic(member), interpreter.interpreter_builder
    tensor: Any = tl.tensor
    known: dict[tuple[Any, ...], tuple[TensorHandle, tuple[Any, ...]] | None] = {}

    def call(left: Any, right: Any, acc: Any = None, **options: Any) -> Any:
        key = left.type.name, right.type.name, acc.type.name if type(acc) is tensor else type(acc), *options
        if key not in known:
            result = first(left, right, acc, **options)
            plain = left.dtype.is_floating() and len(result.shape) == 2 and (acc is None or type(acc) is tensor)
            known[key] = None
            if plain and result.dtype.is_fp32() and {"input_precision"}.issuperset(options):
                zeros = np.zeros(result.handle.data.shape, np.float32)
                known[key] = TensorHandle(zeros, tl.float32), _like(result)
            return result
        if (facts := known[key]) is None:
            return first(left, right, acc, **options)
        start, like = facts
        if type(acc) is tensor:
            start = acc.handle
        return _tensor_of(builder.create_dot(left.handle, right.handle, start, None, None).data, like)

    return call


_FUNCTIONS = {"load": _load, "dot": _dot}
_METHODS = {"to": _cast_method, "__getitem__": _expand_method}


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    faster = _with_semantic(member)
    if owner is tl.tensor:
        if (operator := name.strip("_")) in _COMPUTE:
            faster = _operator(operator, member)
        elif name in _METHODS:
            faster = _METHODS[name](member)
    elif owner is tl and name in _FUNCTIONS:
        faster = _FUNCTIONS[name](member)
    scope.set_attr(owner, name, faster)


_patch_lang = interpreter._patch_lang
_patch_for = cache(_patch_lang)
_patches: dict[frozenset[str], list[tuple[Any, str, Any]]] = {}


def _patch_launch(function: Any) -> Any:
    """Patch the modules of Triton's language that a kernel sees, by what was found when one saw them first.

    To look for it takes 1 ms, as long as a small kernel.
    """
    seen = frozenset(each.__name__ for each in function.__globals__.values() if each is tl or each is tl.core)
    if seen not in _patches:
        scope = _patch_lang(function)
        _patches[seen] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        return scope
    scope = interpreter._LangPatchScope()
    for patch in _patches[seen]:
        scope.set_attr(*patch)
    return scope


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function without patching Triton's language again.

    The launch has already patched `tl`, which our functions see; Triton's own functions see it under another name,
    which stays patched.
    """
    if function.fn.__module__.startswith("triton."):
        _patch_for(function.fn)
    return function.rewrite()(*args, **kwargs)


_reduce_elements = interpreter.ReduceOps.generic_reduce


def _reduce_slices(reduction: Any, operands: tuple[Any, ...]) -> Any:
    """What a function of a kernel's combines along an axis, of all other axes at once, in Triton's order."""
    if reduction.axis is None or operands[0].handle.data.ndim == 1:
        return _reduce_elements(reduction, operands)
    axis = int(reduction.axis)
    data = [np.moveaxis(operand.handle.data, axis, 0) for operand in operands]
    combined: Any = None
    for part in zip(*data, strict=True):
        tensors = [reduction.to_tensor(*each) for each in zip(part, (x.dtype for x in operands), strict=True)]
        combined = tensors if combined is None else reduction.combine_fn.fn(*combined, *tensors)
        combined = combined if isinstance(combined, tuple | list) else (combined,)
    results = [np.ascontiguousarray(each.handle.data) for each in combined]
    if reduction.keep_dims:
        results = [np.expand_dims(result, axis) for result in results]
    return [reduction.to_tensor(result, x.dtype) for result, x in zip(results, operands, strict=True)]


SHORTCUTS: tuple[tuple[Any, str, Any], ...] = (
    (interpreter, "_get_np_dtype", _np_dtype),
    (interpreter, "_patch_attr", _patch_attr),
    (interpreter, "_patch_lang", _patch_launch),
    (interpreter.interpreter_semantic, "__class__", _Semantic),
    (tl.block_type, "__init__", _init_block),
    (tl.tensor, "__init__", _init_tensor),
    (InterpretedFunction, "__call__", _call_device_function),
    (interpreter.ReduceOps, "generic_reduce", _reduce_slices),
)
