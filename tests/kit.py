"""What the tests share: inputs with their strides, guard regions, comparisons."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import torch

from xmla.core.layout import V41_FP4, MlaLayout
from xmla.core.op import Case, Op, registry
from xmla.core.ops.compress_kv.reference import stored_values
from xmla.core.spec import DTYPES

CANARY = 0x5A


@dataclass(frozen=True)
class Tolerance:
    """An element passes by absolute or relative error; the array by 1 − 2Σab / Σ(a² + b²)."""

    absolute: float
    relative: float
    cosine: float


# Probabilities and results are rounded to 8 bits: |error| ≤ 2**-9 (Σ p |v| + |out|), with Σ p |v| up to 1 in the cases.
# FlashMLA's own, tighter bounds are held on FlashMLA's own data in tests/gpu/test_flash_mla.py.
ATTENTION_OUT = Tolerance(2**-8, 2.01 / 128, 5e-6)
# Merged from parts, each of which was rounded too: 2**-9 (2 Σ p |v| + |out|), with few keys, so Σ p |v| up to 2.
MERGED_OUT = Tolerance(2**-7, 2.01 / 128, 5e-6)
ATTENTION_LSE = Tolerance(5e-6, 8.01 / 65536, 1e-7)  # a few float32 roundings of scores of order 10
# DeepGEMM's cosine bound. Hopper adds fp8 products with 13 fraction bits of the largest: 2**-13 of dots
# of up to 60, summed over up to 64 heads with weights and key scales of order 1.
LOGITS = Tolerance(3e-2, 1e-2, 5e-6)
FLOAT32 = Tolerance(1e-6, 1e-6, 1e-12)  # a few float32 roundings
# Entries computed in float32 and then rounded may round the other way: one step of e4m3, or of e2m1 for scales up to 1,
# and not more than a hundredth of them.
ENTRIES_E4M3, ENTRIES_E2M1 = Tolerance(2**-14, 2**-3, 2e-4), Tolerance(0.5, 0.5, 5e-3)


def tolerance_of(op: Op, result: str) -> Tolerance | None:
    """None where the result is exact: bytes, integers, values that are only moved or rounded once."""
    return {
        "out": ATTENTION_OUT, "lse": ATTENTION_LSE, "logits": LOGITS, "folded_weights": FLOAT32,
    }.get(result)  # fmt: skip


def all_cases() -> list[tuple[Op, Case]]:
    return [(op, case) for op in registry().values() for case in op.cases]


def case_id(value: object) -> str:
    return value.name if isinstance(value, Op | Case) else repr(value)


def make(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    return case.make(np.random.default_rng(seed))


def attributes(op: Op, case: Case) -> dict[str, object]:
    return op.defaults | dict(case.attrs)


def copies(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Independent copies with the same strides and the same bytes between the elements."""
    return {name: guarded(array)[0] for name, array in inputs.items()}


def _span(array: np.ndarray) -> int:
    """Elements from the first to one past the last of a strided array."""
    return 1 + sum((n - 1) * (s // array.itemsize) for n, s in zip(array.shape, array.strides, strict=True))


def guarded(array: np.ndarray, margin: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """A copy with the same strides inside a larger buffer of canaries, and that buffer as bytes."""
    if not array.size:
        return array.copy(), np.empty(0, np.uint8)
    span = _span(array) * array.itemsize
    buffer = np.full(margin + span + margin, CANARY, np.uint8)
    inner = np.ndarray(array.shape, array.dtype, buffer.data, margin, array.strides)
    whole = np.lib.stride_tricks.as_strided(array.reshape(-1)[:1] if array.flags.c_contiguous else array, array.shape,
                                            array.strides)  # fmt: skip
    np.copyto(inner.view(_bits(array.dtype)), whole.view(_bits(array.dtype)))
    return inner, buffer


def _bits(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize}")


def to_torch(array: np.ndarray, device: str) -> torch.Tensor:
    """A tensor with the array's strides, sharing memory on the CPU."""
    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=device)
    flat = np.lib.stride_tricks.as_strided(array, (_span(array),), (array.itemsize,))
    raw = torch.from_numpy(flat.view({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[array.itemsize]))
    strides = [s // array.itemsize for s in array.strides]
    return raw.view(getattr(torch, array.dtype.name)).to(device).as_strided(array.shape, strides)


def torch_inputs(op: Op, inputs: dict[str, np.ndarray], device: str) -> list[torch.Tensor | None]:
    return [to_torch(inputs[name], device) if name in inputs else None for name in op.tensors]


def jax_inputs(op: Op, inputs: dict[str, np.ndarray]) -> list[object]:
    return [jnp.asarray(np.ascontiguousarray(inputs[n])) if n in inputs else None for n in op.tensors]


def as_numpy(value: object) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        dtype = DTYPES[str(value.dtype).removeprefix("torch.")][0]
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        return value.detach().cpu().contiguous().view(integer).numpy().view(dtype)
    return np.asarray(value)


def as_tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def assert_bits_equal(name: str, got: object, want: object, where: np.ndarray | None = None) -> None:
    a, b = as_numpy(got), as_numpy(want)
    assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.dtype}{a.shape} against {b.dtype}{b.shape}"
    a, b = (np.ascontiguousarray(x).view(_bits(x.dtype)) for x in (a, b))
    if where is not None:
        a, b = a[where], b[where]
    assert np.array_equal(a, b), f"{name}: {int((a != b).sum())} of {a.size} elements have other bits"


def assert_entries_equal(name: str, layout: MlaLayout, got: object, want: object) -> None:
    """Pools of the same entries: NaN in the same dims, which NaN is the hardware's choice, and the bits of the rest.

    An entry with a NaN has other bits than its own: those of its scale. So its other dims are compared as values.
    """
    pools = [as_numpy(pool).copy() for pool in (got, want)]
    slots = np.arange(pools[1].shape[0] * pools[1].shape[1])
    with np.errstate(invalid="ignore"):
        ours, theirs = (layout.gather(pool, slots) for pool in pools)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all(), f"{name}: {int((~same).sum())} of {same.size} values differ"
    broken = slots[np.isnan(theirs).any(axis=1)]
    for pool in pools:
        layout.scatter(
            pool, broken, *(np.zeros((len(broken), dims), np.float32) for dims in (layout.latent, layout.rope))
        )
    assert_bits_equal(name, *pools)


def assert_close(
    name: str, got: object, want: object, tolerance: Tolerance | None, where: np.ndarray | None = None
) -> None:
    """Infinities and NaN in the same places, then each element, then the whole; `where` limits the comparison."""
    a, b = as_numpy(got), as_numpy(want)
    assert a.shape == b.shape, f"{name}: shape {a.shape}, expected {b.shape}"
    if where is not None:
        a, b = a[where], b[where]
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), f"{name}: infinities or NaN in other places"
    size = np.abs(np.where(finite, b, 0.0))
    error = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0))
    bound = Tolerance(0.0, 0.0, np.inf) if tolerance is None else tolerance
    bad = finite & ~((error <= bound.absolute) | (error <= bound.relative * size))
    if bad.any():
        worst = np.unravel_index(np.argmax(np.where(bad, error, -1)), b.shape)
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {b.size} off; at {worst} got {a[worst]}, expected {b[worst]}"
        )
    a, b = a[finite], b[finite]
    if a.any() or b.any():
        cosine = 1 - 2 * float((a * b).sum()) / float((a * a + b * b).sum())
        assert cosine <= bound.cosine, f"{name}: cosine difference {cosine:.2e}"


def assert_updated(
    op: Op, attrs: Mapping[str, object], inputs: dict[str, np.ndarray], name: str, got: object,
    alike: Sequence[np.ndarray] = (),
) -> None:  # fmt: skip
    """A mutated argument against what the definition left in `inputs`: its bits, or the values of computed entries.

    Of these only the ones that are the same in each of `alike`.
    """
    want = inputs[name]
    if (op.name, name) != ("compress_kv", "cache"):
        where = None
        if want.dtype.kind not in "iu" and want.dtype.itemsize == 2:  # a NaN that a GPU has rounded has every such bit
            nan = as_numpy(got).view(_bits(want.dtype)) & np.array(0x7FFF, _bits(want.dtype)) == 0x7FFF
            where = ~(nan & np.isnan(want.astype(np.float32)))
        assert_bits_equal(name, got, want, where)
        return
    cache_format = attrs.get("cache_format")
    with np.errstate(all="ignore"):
        dim = len(inputs["norm_weight"])
        a, b, *others = (stored_values(cache, dim, cache_format) for cache in (as_numpy(got), want, *alike))
        kept = np.ones(len(b), bool)
        for other in others:
            kept &= ((b == other) | (np.isnan(b) & np.isnan(other))).reshape(len(b), -1).all(axis=1)
        a, b = a[kept], b[kept]
    assert_close(name, a, b, ENTRIES_E2M1 if want.shape[2] in (V41_FP4.row, dim // 2 + 4) else ENTRIES_E4M3)
    other = (a != b) & ~np.isnan(b)
    assert other.sum() <= 1 + np.isfinite(b).sum() // 100, f"{name}: {other.sum()} of {other.size} values differ"


def written(op: Op, reference: np.ndarray) -> np.ndarray | None:
    """Where a result is defined: the reference of `indexer_logits_paged` marks with NaN what the op never writes."""
    return ~np.isnan(reference) if op.name == "indexer_logits_paged" else None


def results(op: Op, reference: object) -> Iterator[tuple[str, np.ndarray]]:
    yield from zip(op.outputs, as_tuple(reference), strict=True)
