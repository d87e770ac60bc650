"""Tolerances of results against the reference, in one place for tests, `xmla verify`, `xmla replay` and XMLA_SHADOW."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An element agrees by absolute or relative error; the array by 1 − 2Σab / Σ(a² + b²) and by Σab / Σb² − 1.

    `in_bfloat16`: the array's bound where a result that is float32 by default is bfloat16; None: `cosine`.
    `factor`: the bound on a factor common to the array, as a wrong scale is: the cosine has half of its square alone.
    """

    absolute: float
    relative: float
    cosine: float
    in_bfloat16: float | None = None
    factor: float = 1e-3

    def array(self, dtype: np.dtype) -> float:
        """The array's bound of a result of this dtype."""
        return self.in_bfloat16 if dtype == ml_dtypes.bfloat16 and self.in_bfloat16 is not None else self.cosine


@dataclass(frozen=True, slots=True)
class Selection:
    """Indices of selected keys. Keys within rounding of the last selected key may be chosen differently.

    `recall`: the least share of a row's keys that must agree on live data. The cases of the ops have no such keys.
    """

    recall: float = 0.99


Agreement = Tolerance | Selection
EXACT = Tolerance(0.0, 0.0, np.inf)

# Probabilities and results are rounded to 8 bits: |error| ≤ 2**-9 (Σ p |v| + |out|), with Σ p |v| up to 1 in the cases.
# tests/gpu/test_flash_mla.py holds FlashMLA's own, tighter bounds on FlashMLA's own data.
ATTENTION_OUT = Tolerance(2**-8, 2.01 / 128, 5e-6)
ATTENTION_LSE = Tolerance(5e-6, 8.01 / 65536, 1e-7)  # a few float32 roundings of scores of order 10
# Sums over tokens and heads of products whose operands are rounded to 8 bits; the measure of TileLang's tests is 1e-4.
# The gradient of a score, so rounded by 2**-9, is a factor of a whole row, and there may be one row.
GRADIENT = Tolerance(2**-6, 2.01 / 128, 2e-5, factor=2**-9)
# DeepGEMM's cosine bound. Hopper adds fp8 products with 13 fraction bits of the largest: 2**-13 of dots
# of up to 60, summed over up to 64 heads with weights and key scales of order 1.
# Rounded to bfloat16 a logit moves by 2**-9 of itself: (√(2 · 5e-6) + 2**-9)² / 2.
LOGITS = Tolerance(3e-2, 1e-2, 5e-6, in_bfloat16=1.4e-5)
# Products of 16-bit operands summed in float32, over up to 128 dims and 64 heads: roundings of sums of order 1000.
SCORES = Tolerance(1e-3, 1e-4, 1e-9)
# Probabilities of scores of order 10, which have a few float32 roundings, and sums of them.
PROBABILITIES = Tolerance(1e-5, 2e-4, 1e-7)
FLOAT32 = Tolerance(1e-6, 1e-6, 1e-12)  # a few float32 roundings
# Entries computed in float32 and then rounded may round the other way: by one step of e4m3, or of e2m1 for scales up to
# 1, and in at most a hundredth of them.
ENTRIES_E4M3, ENTRIES_E2M1 = Tolerance(2**-14, 2**-3, 2e-4), Tolerance(0.5, 0.5, 5e-3)


def difference(got: np.ndarray, want: np.ndarray, agreement: Agreement | None) -> str | None:
    """How `got` disagrees with the reference, or None: places of infinities and NaN, an element, the whole array."""
    bound = agreement if isinstance(agreement, Tolerance) else EXACT
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaN in other places"
    size = np.abs(np.where(finite, b, 0.0))
    error = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0))
    bad = finite & ~((error <= bound.absolute) | (error <= bound.relative * size))
    if bad.any():
        worst = np.unravel_index(np.argmax(np.where(bad, error, -1)), b.shape)
        return f"{int(bad.sum())} of {b.size} off; at {worst} got {a[worst]}, expected {b[worst]}"
    if bound is EXACT:
        return None
    counted = finite & ~are_subnormal(a, b, got.dtype)
    a, b = a[counted], b[counted]
    apart, limit = cosine_difference(a, b), bound.array(got.dtype)
    if not apart <= limit:
        return f"cosine difference {apart:.2e}"
    factor, by_chance = factor_difference(a, b, limit)
    return None if abs(factor) <= bound.factor + by_chance else f"a factor of {1 + factor:.5f}"


def are_subnormal(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Where both are less than the smallest normal number of a result's dtype: such have fewer bits than others."""
    return np.maximum(np.abs(a), np.abs(b)) < float(ml_dtypes.finfo(dtype).smallest_normal)


def cosine_difference(a: np.ndarray, b: np.ndarray) -> float:
    """|1 − 2Σab / Σ(a² + b²)| of finite float64 arrays: FlashMLA's and DeepGEMM's measure."""
    total = float((a * a + b * b).sum())
    return abs(1 - 2 * float((a * b).sum()) / total) if total else 0.0


def factor_difference(a: np.ndarray, b: np.ndarray, cosine: float) -> tuple[float, float]:
    """f = Σab / Σb² − 1 of finite float64 arrays, and what it may be by chance, if errors of elements are independent.

    That is three standard deviations: errors ‖a − (1 + f) b‖ / ‖b‖ of an element, times s = √Σb⁴ / Σb², which is 1 of
    one element and √(3 / n) of n normal ones. Few elements show no error beside f; they have what `cosine` admits,
    √(2 · cosine), times s².
    """
    squares = b * b
    total = float(squares.sum())
    if not total:
        return 0.0, 0.0
    factor = float(((a - b) * b).sum()) / total
    spread = float(np.linalg.norm(squares)) / total
    error = float(np.linalg.norm(a - (1 + factor) * b)) / total**0.5
    return factor, 3 * error * spread + (2 * cosine) ** 0.5 * spread**2
