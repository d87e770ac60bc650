"""What a Spec says of an array's memory is so of NumPy arrays, element by element."""

from itertools import product

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from xmla.core.values import DTYPES, Spec, alignment_of, row_major

MEMORY = np.zeros(1 << 12, np.uint8)
ARRAYS = [  # shape, strides in elements
    ((3, 4), (4, 1)), ((3, 4), (1, 3)), ((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (40, 13, 3)), ((1, 4), (7, 1)),
    ((3, 1), (1, 9)), ((1, 1, 2), (5, 5, 2)), ((2, 2), (0, 1)), ((5,), (2,)), ((1,), (3,)), ((2, 1, 3), (8, 2, 1)),
]  # fmt: skip
SPECS = [Spec(shape, dtype, strides) for shape, strides in ARRAYS for dtype in ("uint8", "bfloat16", "float32")]


def elements(spec: Spec, address: int = 0) -> list[int]:
    """The address of each element."""
    assert spec.strides is not None
    steps = [stride * spec.itemsize for stride in spec.strides]
    return [
        address + sum(place * step for place, step in zip(index, steps, strict=True))
        for index in product(*map(range, spec.shape))
    ]


def taken(spec: Spec, address: int) -> set[int]:
    return {first + byte for first in elements(spec, address) for byte in range(spec.itemsize)}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 1, 5), (2, 3, 4, 5)])
def test_row_major_is_numpys(shape: tuple[int, ...]) -> None:
    dense = np.zeros(shape, np.uint8)
    assert row_major(shape) == dense.strides
    spec = Spec(shape, "float32")
    assert spec.span == spec.nbytes == 4 * dense.size
    assert all(spec.stride(axis) == dense.strides[axis] for axis in range(-len(shape), len(shape)))


@pytest.mark.parametrize("name", DTYPES)
def test_of_numpy(name: str) -> None:
    dtype = DTYPES[name][0]
    array = MEMORY.view(dtype)[:24].reshape(4, 6)[::2, ::3]
    spec = Spec.of_numpy(array)
    assert (spec.shape, spec.dtype, spec.strides) == ((2, 2), name, (12, 3))
    assert (spec.itemsize, spec.nbytes) == (dtype.itemsize, 4 * dtype.itemsize)
    assert spec.alignment == alignment_of(array.ctypes.data)
    assert Spec.of_numpy(array[:0]).strides is None


def test_alignment() -> None:
    assert [alignment_of(address) for address in (0, 16, 48, 8, 24, 4, 2, 6, 1, 33)] == [
        16,
        16,
        16,
        8,
        8,
        4,
        2,
        2,
        1,
        1,
    ]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_strides(spec: Spec) -> None:
    """Along an axis of one element the stride is a dense array's, and any will do."""
    assert spec.strides is not None
    for axis, (size, stride) in enumerate(zip(spec.shape, spec.strides, strict=True)):
        for place in (axis, axis - len(spec.shape)):
            behind = spec.shape[axis + 1] * spec.stride(axis + 1) if axis + 1 < len(spec.shape) else 1
            assert spec.stride(place) == (stride if size > 1 else behind)
            assert spec.has_stride(place, stride)
            assert spec.has_stride(place, stride + 1) == (size == 1)
    assert Spec((3, 0), "uint8", (9, 9)).has_stride(0, 4), "nothing lies anywhere"
    assert not Spec((3, 1), "uint8", (9, 9)).has_stride(0, 4)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bytes(spec: Spec) -> None:
    assert spec.span == max(elements(spec)) + spec.itemsize
    array = as_strided(
        MEMORY.view(DTYPES[spec.dtype][0]), spec.shape, [stride * spec.itemsize for stride in spec.strides or ()]
    )
    assert Spec.of_numpy(array).span == spec.span
    assert Spec((*spec.shape, 0), spec.dtype, (*(spec.strides or ()), 1)).span == 0


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_overlaps(spec: Spec) -> None:
    """Interleaved arrays have no byte in common, though one begins before the other ends."""
    ours = taken(spec, 512)
    for other in SPECS[::4]:
        for address in (
            512 - other.span,
            513 - other.span,
            508,
            511,
            512,
            513,
            514,
            520,
            511 + spec.span,
            512 + spec.span,
        ):
            assert spec.overlaps(512, other, address) == bool(ours & taken(other, address)), (other, address)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_multiples(spec: Spec) -> None:
    axes = tuple(range(len(spec.shape)))
    for alignment, unit in product((16, 8, 4, 2, 1), (16, 8, 4, 2, 1)):
        placed = Spec(spec.shape, spec.dtype, spec.strides, alignment)
        held = all(address % unit == 0 for address in elements(spec, alignment))
        # Of an axis of one element it asks for the dense array's stride, which some address may not have.
        assert placed.on_multiples(unit, axes) == held or 1 in spec.shape
        if alignment % unit:
            assert not placed.on_multiples(unit, ())


def test_vectors() -> None:
    for dtype, elements_ in (("float32", 4), ("bfloat16", 8), ("uint8", 16)):
        spec = Spec((1,), dtype)
        assert spec.vector() == spec.vector(elements_, 3 * elements_, 0) == elements_
        assert spec.vector(elements_, elements_ // 2) == spec.vector(elements_ + 1) == 1
