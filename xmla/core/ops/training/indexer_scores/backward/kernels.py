import triton
import triton.language as tl

from xmla.core.lang.numbers import power_of_two
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.scores import (
    bound_sums,
    columns_of,
    differentiate,
    greatest_slope,
    indices_of,
    key_range,
    load_query,
    score,
    store_gradients,
)
from xmla.core.lang.sums import as_sums, exponent_of_unit


@triton.jit
def bound_scores_kernel(
    q_ptr,  # [T, I, D]
    weights_ptr,  # [T, I] f32
    dscores_ptr,  # [T, COLUMNS] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32 if COLUMNS.HAS_INDICES
    num_keys,  # N
    num_columns,  # K or N
    bounds_ptr,  # [N] i32, the bits of floats: of the greatest summand of each key's gradient
    C: tl.constexpr,  # ScoresDerivative
):
    BLOCK_N: tl.constexpr = C.BLOCK_N
    token = tl.program_id(0).to(tl.int64)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, C.COLUMNS)
    count = num_columns if C.COLUMNS.HAS_INDICES else tl.maximum(end - start, 0)
    indices_row = indices_of(indices_ptr, token, C.COLUMNS)
    dscores_row = dscores_ptr + offset_of(token, C.DSCORE_STRIDE)
    q, weights = load_query(q_ptr, weights_ptr, token, C.INDEXER)
    slope = greatest_slope(q, weights)
    for first in tl.range(0, count, BLOCK_N):
        column, key, ok = columns_of(first, start, end, indices_row, num_columns, C.COLUMNS, BLOCK_N)
        dscores = tl.load(dscores_row + column, mask=ok, other=0.0)
        bound_sums(bounds_ptr, slope * tl.abs(dscores), key, ok)


@triton.jit
def indexer_scores_backward_kernel(
    q_ptr,  # [T, I, D]
    k_ptr,  # [N, D]
    weights_ptr,  # [T, I] f32
    dscores_ptr,  # [T, COLUMNS] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32 if COLUMNS.HAS_INDICES
    bounds_ptr,  # [N] i32
    num_keys,  # N
    num_columns,  # K or N
    log2_parts,  # binary logarithm of the number of summands of a key's gradient, rounded up
    marks_ptr,  # [N] i8, 1 for a key whose gradient is NaN
    sums_ptr,  # [N, 2·D] i32
    dq_ptr,  # [T, I, D]
    dweights_ptr,  # [T, I] f32
    C: tl.constexpr,  # ScoresDerivative
):
    INDEXER: tl.constexpr = C.INDEXER
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_I: tl.constexpr = INDEXER.BLOCK_I
    D: tl.constexpr = INDEXER.D
    token = tl.program_id(0).to(tl.int64)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, C.COLUMNS)
    count = num_columns if C.COLUMNS.HAS_INDICES else tl.maximum(end - start, 0)
    indices_row = indices_of(indices_ptr, token, C.COLUMNS)
    dscores_row = dscores_ptr + offset_of(token, C.DSCORE_STRIDE)
    q, weights = load_query(q_ptr, weights_ptr, token, INDEXER)
    slope = greatest_slope(q, weights)
    dq = tl.zeros([BLOCK_I, D], tl.float32)
    dweights = tl.zeros([BLOCK_I], tl.float32)
    for first in tl.range(0, count, BLOCK_N):
        column, key, ok = columns_of(first, start, end, indices_row, num_columns, C.COLUMNS, BLOCK_N)
        keys, dots, _ = score(q, k_ptr, weights, key, ok, INDEXER.K_STRIDE)
        dscores = tl.load(dscores_row + column, mask=ok, other=0.0)
        right = slope * tl.abs(dscores) < float("inf")
        dq, dweights = differentiate(
            q, weights, keys, dots, dscores, key, ok, right, dq, dweights, log2_parts, bounds_ptr, marks_ptr, sums_ptr
        )
    store_gradients(dq_ptr, dweights_ptr, token, dq, dweights, INDEXER.HEADS)


@triton.jit
def round_keys_kernel(
    marks_ptr,  # [N] i8
    sums_ptr,  # [N, 2·D] i32
    bounds_ptr,  # [N] i32
    num_keys,  # N
    log2_parts,
    dk_ptr,  # [N, D]
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    key = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    ok = key < num_keys
    place = offset_of(key[:, None], D) + tl.arange(0, D)[None, :]
    unit = power_of_two(-exponent_of_unit(tl.load(bounds_ptr + key, mask=ok, other=0), log2_parts))
    value = tl.load(as_sums(sums_ptr) + place, mask=ok[:, None], other=0).to(tl.float32) * unit[:, None]
    wrong = tl.load(marks_ptr + key, mask=ok, other=0) != 0
    value = tl.where(wrong[:, None], float("nan"), value)
    tl.store(dk_ptr + place, value.to(dk_ptr.dtype.element_ty), mask=ok[:, None])
