"""Sums in two parts are those of the integers, and no part overflows, by the functions that kernels call."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st

from xmla.core.lang.sums import LOW_BITS, SUM_WORDS, SUMMAND_BITS, as_sums, exponent_within, low_bits, parts_of
from xmla.core.ops.attention.sparse_mla.backward.kernels import add_to_sums, load_sums

MOST = 7 * 2**28 - 1  # of a summand: its bound, 1.5 times that of a probability of 1.5, and roundings
POWERS = [s * 2**b + d for b in (1, 9, 10, 27, 28, 29) for s in (1, -1) for d in (-1, 1)]
LIMITS = [0, 1, -1, MOST, -MOST, 2**30, -(2**30), *POWERS]
COUNTS = [1, 2, 3, 4, 2**20 - 1, 2**20, 2**20 + 1, 2**24 - 1, 2**24 + 1, 2**25 - 1, 2**30 - 1, 2**30, 2**31 - 1]
LAUNCH = {"enable_fp_fusion": True}  # spelled out, as by xmla: defaults differ between versions
summands, counts = st.integers(-MOST, MOST), st.integers(1, 2**31 - 1)


@triton.jit
def parts_kernel(x_ptr, count_ptr, bits_ptr, low_ptr, high_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    bits = low_bits(tl.load(count_ptr + offs))
    low, high = parts_of(tl.load(x_ptr + offs), bits)
    tl.store(bits_ptr + offs, bits)
    tl.store(low_ptr + offs, low)
    tl.store(high_ptr + offs, high)


@triton.jit
def exponent_kernel(bound_ptr, exponent_ptr, MOST: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    bits = tl.load(bound_ptr + offs).to(tl.int32, bitcast=True)
    tl.store(exponent_ptr + offs, exponent_within(bits, MOST))


@triton.jit
def sum_kernel(x_ptr, count_ptr, sums_ptr, total_ptr, ROWS: tl.constexpr, DIMS: tl.constexpr, PAIRED: tl.constexpr):
    offs_n, offs_d = tl.arange(0, ROWS)[:, None], tl.arange(0, DIMS)[None, :]
    bits = low_bits(tl.load(count_ptr + tl.arange(0, ROWS) * 0))[:, None]
    row = sums_ptr + offs_n * 0
    x = x_ptr + offs_n * DIMS
    if PAIRED:
        pair = tl.arange(0, DIMS // 2)[None, :]
        offs_first = pair // 8 * 16 + pair % 8
        first, first_high = parts_of(tl.floor(tl.load(x + offs_first) + 0.5).to(tl.int32), bits)
        second, second_high = parts_of(tl.floor(tl.load(x + offs_first + 8) + 0.5).to(tl.int32), bits)
        tl.atomic_add(as_sums(row) + pair, (second.to(tl.int64) << 32) + first.to(tl.int64))
        tl.atomic_add(as_sums(row + DIMS) + offs_first, first_high.to(tl.int64))
        tl.atomic_add(as_sums(row + DIMS) + offs_first + 8, second_high.to(tl.int64))
    else:
        add_to_sums(row, offs_d, tl.load(x + offs_d), bits, (offs_n >= 0) & (offs_d >= 0), DIMS)
    tl.debug_barrier()
    alone = offs_n == 0
    total = load_sums(row, offs_d, bits, alone & (offs_d >= 0), DIMS, PAIRED)
    tl.store(total_ptr + offs_d + offs_n * 0, total, mask=alone)


def parts(x: np.ndarray, count: np.ndarray, device: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bits of low parts, and both parts, of every x among so many."""
    size = triton.next_power_of_2(len(x))
    x, count = (np.pad(a, (0, size - len(a)), mode="edge").astype(np.int32) for a in (x, count))
    given = [torch.from_numpy(a).to(device) for a in (x, count)]
    found = [torch.empty(size, dtype=torch.int32, device=device) for _ in range(3)]
    parts_kernel[(1,)](*given, *found, N=size, **LAUNCH)
    bits, low, high = (a.cpu().numpy().astype(np.int64) for a in found)
    return bits, low, high


def check_parts(x: list[int], count: list[int], device: str) -> None:
    bits, low, high = (a[: len(x)] for a in parts(np.array(x), np.array(count), device))
    assert ((bits >= 1) & (bits <= LOW_BITS)).all()
    assert (low + (high << bits) == x).all()
    half = 1 << (bits - 1)
    assert ((low >= -half) & (low < half)).all()
    of = np.array(count, np.int64)
    assert (of * -half >= -(2**31)).all() and (of * (half - 1) < 2**31).all(), "the sum of low parts overflows"
    assert ((of << bits >= 2**30) | (bits == LOW_BITS)).all(), "fewer bits than fit"


def test_parts_at_their_limits(device: str) -> None:
    pairs = [(x, count) for x in LIMITS for count in COUNTS]
    check_parts([x for x, _ in pairs], [count for _, count in pairs], device)


@given(st.lists(st.tuples(summands, counts), min_size=1, max_size=64))
def test_parts_are_of_the_number(device: str, pairs: list[tuple[int, int]]) -> None:
    check_parts([x for x, _ in pairs], [count for _, count in pairs], device)


@pytest.mark.parametrize("most", [14, SUMMAND_BITS.value, 60])
@given(bounds=st.lists(st.floats(0, width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
@example(
    bounds=[0.0, 2.0**-149, 2.0**-126, 1.0, float(np.nextafter(np.float32(1), np.float32(0))), 3.4028234663852886e38]
)
def test_a_units_exponent_is_the_greatest_that_fits(device: str, most: int, bounds: list[float]) -> None:
    size = triton.next_power_of_2(len(bounds))
    given = torch.tensor(bounds + [0.0] * (size - len(bounds)), dtype=torch.float32, device=device)
    found = torch.empty(size, dtype=torch.int32, device=device)
    exponent_kernel[(1,)](given, found, MOST=most, N=size, **LAUNCH)
    exponents = found.cpu().numpy()[: len(bounds)]
    assert ((exponents >= -126) & (exponents <= 126)).all()
    for bound, exponent in zip(bounds, exponents, strict=True):
        scaled = float(np.float32(bound)) * 2.0 ** int(exponent)  # exact in float64
        assert scaled <= 2.0**most
        assert scaled >= 2.0 ** (most - 1) or exponent == 126


def sums(x: np.ndarray, count: int, paired: bool, device: str) -> np.ndarray:
    """The sums over the rows of x [N, D], added with the parts of `count` summands."""
    rows, dims = x.shape
    words = torch.zeros(SUM_WORDS * dims, dtype=torch.int32, device=device)
    total = torch.empty(dims, dtype=torch.float32, device=device)
    counts = torch.full((1,), count, dtype=torch.int32, device=device)
    sum_kernel[(1,)](
        torch.from_numpy(x).to(device), counts, words, total, ROWS=rows, DIMS=dims, PAIRED=paired, **LAUNCH
    )
    return total.cpu().numpy()


KINDS = ("large", "small", "mixed", "cancelling")


@pytest.mark.parametrize("paired", [False, True], ids=["alone", "paired"])
@pytest.mark.parametrize("count", [0, 2**20, 2**31 - 1], ids=lambda count: f"count{count}")
@given(seed=st.integers(0, 2**31 - 1), rows=st.sampled_from([1, 2, 256]), kind=st.sampled_from(KINDS))
@example(seed=0, rows=4096, kind="large")
@example(seed=0, rows=4096, kind="cancelling")
def test_sums_are_exact(device: str, count: int, paired: bool, seed: int, rows: int, kind: str) -> None:
    """With parts of as many summands as there are, or of more."""
    rng = np.random.default_rng(seed)
    dims = 32 if paired else 4
    x = rng.uniform(-(2**30), 2**30, (rows, dims))
    x[:, 0] = MOST // 2**8 * 2**8  # all of one sign
    if kind != "large":
        small = rng.uniform(-(2**12), 2**12, (rows, dims))
        x = small if kind == "small" else np.where(rng.random((rows, dims)) < 0.1, x, small)
    if kind == "cancelling" and rows > 1:
        x[rows // 2 :] = -x[: rows // 2]
        x[0] += rng.uniform(-100, 100, dims)
    x = x.astype(np.float32)
    want = np.floor(x + np.float32(0.5)).astype(np.int64).sum(0)
    np.testing.assert_array_equal(sums(x, count or rows, paired, device), want.astype(np.float32))
