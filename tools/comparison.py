"""What the fuzzer and the tests share: copies between guards, comparisons of results and of what a call updates."""

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from xmla.core.op import Op
from xmla.core.values import DTYPES, Agreement, difference

CANARY = 0x5A


def must_differ(op: Op, name: str) -> bool:
    """Whether an argument leads to where an op that updates in place writes: two rows may not meet there.

    Where slots name what is written, they alone do. A request's own row, as of `resolve_slots`, is nobody else's.
    """
    updated = {axis for pool in op.mutates if op.tensors[pool].names[0] != "B" for axis in op.tensors[pool].names}
    axes = {n: set(tensor.index_of.split()) for n, tensor in op.tensors.items()}
    if slots := [n for n, indexed in axes.items() if len(indexed) > 1 and indexed & updated]:
        return name in slots
    return bool(updated) and (not axes[name] or bool(axes[name] & updated))


def span(array: np.ndarray) -> int:
    """Elements from the first to one past the last of a strided array."""
    return 1 + sum((n - 1) * (s // array.itemsize) for n, s in zip(array.shape, array.strides, strict=True))


def guarded(array: np.ndarray, margin: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """A copy with the same strides inside a larger buffer of canaries, and that buffer as bytes."""
    if not array.size:
        return array.copy(), np.empty(0, np.uint8)
    size = span(array) * array.itemsize
    buffer = np.full(margin + size + margin, CANARY, np.uint8)
    inner = np.ndarray(array.shape, array.dtype, buffer.data, margin, array.strides)
    whole = np.lib.stride_tricks.as_strided(array.reshape(-1)[:1] if array.flags.c_contiguous else array, array.shape,
                                            array.strides)  # fmt: skip
    np.copyto(inner.view(_bits(array.dtype)), whole.view(_bits(array.dtype)))
    return inner, buffer


def _bits(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize}")


def as_numpy(value: object) -> np.ndarray:
    torch = sys.modules.get("torch")  # seconds of an import, which programs of JAX alone do not need
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = DTYPES[str(value.dtype).removeprefix("torch.")][0]
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        return value.detach().cpu().contiguous().view(integer).numpy().view(dtype)
    return np.asarray(value)


def assert_bits_equal(name: str, got: object, want: object, where: np.ndarray | None = None) -> None:
    a, b = as_numpy(got), as_numpy(want)
    assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.dtype}{a.shape} against {b.dtype}{b.shape}"
    a, b = (np.ascontiguousarray(x).view(_bits(x.dtype)) for x in (a, b))
    if where is not None:
        a, b = a[where], b[where]
    assert np.array_equal(a, b), f"{name}: {int((a != b).sum())} of {a.size} elements have other bits"


def assert_close(
    name: str, got: object, want: object, agreement: Agreement | None, where: np.ndarray | None = None
) -> None:
    """`xmla.core.values.tolerance.difference` finds none; `where` limits the comparison."""
    a, b = as_numpy(got), as_numpy(want)
    assert a.shape == b.shape, f"{name}: shape {a.shape}, expected {b.shape}"
    if where is not None:
        a, b = a[where], b[where]
    found = difference(a, b, agreement)
    assert found is None, f"{name}: {found}"


def assert_updated(
    op: Op, attrs: Mapping[str, object], inputs: dict[str, np.ndarray], name: str, got: object,
    alike: Sequence[np.ndarray] = (),
) -> None:  # fmt: skip
    """A mutated argument against what the reference left in `inputs`: its bits, or the values of computed entries.

    Of these only the ones that are the same in each of `alike`.
    """
    want = inputs[name]
    updated = op.updates[name]
    if updated is None:
        where = None
        if want.dtype.kind not in "iu" and want.dtype.itemsize == 2:  # a NaN that a GPU has rounded has every such bit
            nan = as_numpy(got).view(_bits(want.dtype)) & np.array(0x7FFF, _bits(want.dtype)) == 0x7FFF
            where = ~(nan & np.isnan(want.astype(np.float32)))
        assert_bits_equal(name, got, want, where)
        return
    with np.errstate(all="ignore"):
        a, b, *others = (updated.values(cache, inputs, attrs) for cache in (as_numpy(got), want, *alike))
        kept = np.ones(len(b), bool)
        for other in others:
            kept &= ((b == other) | (np.isnan(b) & np.isnan(other))).all(axis=tuple(range(1, b.ndim)))
        a, b = a[kept], b[kept]
    assert_close(name, a, b, updated.agreement(want, inputs, attrs))
    other = (a != b) & ~np.isnan(b)
    assert other.sum() <= 1 + np.isfinite(b).sum() // 100, f"{name}: {other.sum()} of {other.size} values differ"
