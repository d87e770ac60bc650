"""Scores of an indexer over 16-bit keys, their derivative, and attention's target, inside kernels.

A program has one token: the rows of its products are keys, the columns are heads.
"""

import triton
import triton.language as tl

from xmla.core.lang.numbers import LOG2E, power_of_two
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.sums import as_sums, exponent_of_unit

CHUNK = tl.constexpr(64)  # dims of attention's rows that are multiplied at once
LARGEST = tl.constexpr(3.4028234663852886e38)  # float32


@triton.jit
def key_range(starts_ptr, ends_ptr, token, num_keys, COLUMNS: tl.constexpr):
    """The first key that a token may see, and one past the last."""
    start = 0
    end = num_keys
    if COLUMNS.HAS_STARTS:
        start = tl.maximum(tl.load(starts_ptr + token), 0)
    if COLUMNS.HAS_ENDS:
        end = tl.maximum(tl.minimum(tl.load(ends_ptr + token), num_keys), 0)
    return start, end


@triton.jit
def indices_of(indices_ptr, token, COLUMNS: tl.constexpr):
    """Pointer to a token's row of indices, for `columns_of`; without indices it is not read."""
    if COLUMNS.HAS_INDICES:
        return indices_ptr + offset_of(token, COLUMNS.INDEX_STRIDE)
    else:
        return indices_ptr


@triton.jit
def columns_of(first, start, end, indices_row, num_columns, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of columns: their places in the row, their keys, and which are valid, all [BLOCK_N].

    `first` counts from the row's first column with indices, else from the first key of its range.
    """
    column = first + tl.arange(0, BLOCK_N)
    if COLUMNS.HAS_INDICES:
        key = tl.load(indices_row + column, mask=column < num_columns, other=-1)
    else:
        column += start
        key = column
    return column, key, (key >= start) & (key < end)


@triton.jit
def load_query(q_ptr, weights_ptr, token, INDEXER: tl.constexpr):
    """The queries [BLOCK_I, D] and weights [BLOCK_I] f32 of a token's index heads; 0 past the last."""
    HEADS: tl.constexpr = INDEXER.HEADS
    head = tl.arange(0, INDEXER.BLOCK_I)
    q_row = q_ptr + offset_of(token, INDEXER.Q_STRIDE_T) + offset_of(head[:, None], INDEXER.Q_STRIDE_I, HEADS)
    q = tl.load(q_row + tl.arange(0, INDEXER.D)[None, :], mask=(head < HEADS)[:, None], other=0.0)
    weights = tl.load(weights_ptr + offset_of(token, INDEXER.WEIGHT_STRIDE) + head, mask=head < HEADS, other=0.0)
    return q, weights


@triton.jit
def score(q, k_ptr, weights, key, ok, K_STRIDE: tl.constexpr):
    """Keys [BLOCK_N, D], their products relu(k · q) [BLOCK_N, BLOCK_I] f32 and scores [BLOCK_N] f32; 0 where not ok."""
    offs_d = tl.arange(0, q.shape[1])
    keys = tl.load(k_ptr + offset_of(key[:, None], K_STRIDE) + offs_d[None, :], mask=ok[:, None], other=0.0)
    dots = tl.where(ok[:, None], tl.dot(keys, tl.trans(q)), 0.0)
    dots = tl.maximum(dots, 0.0, tl.PropagateNan.ALL)
    return keys, dots, tl.where(ok, tl.sum(dots * weights[None, :], 1), 0.0)


@triton.jit
def greatest_slope(q, weights):
    """A bound on a key's gradient by a token, per unit of its score's: inf if an operand is not finite."""
    wide = q.to(tl.float32)
    greatest = tl.max(tl.max(tl.abs(wide), 1), 0)
    bound = tl.sum(tl.abs(weights) * greatest, 0)
    # The greatest of NaN and a number is the number.
    finite = tl.sum(tl.sum(wide * 0.0, 1), 0) + tl.sum(weights * 0.0, 0) == 0.0
    return tl.where(finite, bound, float("inf"))


@triton.jit
def bound_sums(bounds_ptr, bound, key, ok):
    """Raise the bounds of keys [BLOCK_N] on the summands of their gradients to `bound` f32 where it is finite."""
    ok &= bound < float("inf")
    bits = tl.where(ok, bound, 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(bounds_ptr + key, bits, mask=ok, sem="relaxed")


@triton.jit
def differentiate(
    q, weights, keys, dots, dscores, key, ok, right, dq, dweights, log2_parts, bounds_ptr, marks_ptr, sums_ptr
):  # fmt: skip
    """Add a tile's part to dq [BLOCK_I, D] and dweights [BLOCK_I], and to the sums of its keys' gradients.

    dscores [BLOCK_N] f32 are 0 where not ok. Keys that are not `right` get a gradient of NaN.
    """
    operand = tl.bfloat16 if q.dtype == tl.bfloat16 else tl.float32  # float16 has too few exponents
    D: tl.constexpr = q.shape[1]
    # The derivative at 0 is 0, as in the frameworks' relu; that of NaN is not.
    ddots = tl.where(dots == 0.0, 0.0, dscores[:, None] * weights[None, :]).to(operand)
    dweights += tl.sum(dots * dscores[:, None], 0)
    dq = tl.dot(tl.trans(ddots), keys.to(operand), dq)
    dkeys = tl.dot(ddots, q.to(operand))  # [BLOCK_N, D] f32
    scale_up = power_of_two(exponent_of_unit(tl.load(bounds_ptr + key, mask=ok, other=0), log2_parts))
    sums = as_sums(sums_ptr) + offset_of(key[:, None], D) + tl.arange(0, D)[None, :]
    tl.atomic_add(sums, (dkeys * scale_up[:, None]).to(tl.int64), mask=(ok & right)[:, None], sem="relaxed")
    tl.store(marks_ptr + key, tl.full(key.shape, 1, tl.int8), mask=ok & (right == 0))
    return dq, dweights


@triton.jit
def store_gradients(dq_ptr, dweights_ptr, token, dq, dweights, HEADS: tl.constexpr):
    """Store dq [BLOCK_I, D] and dweights [BLOCK_I] of a token's index heads, rounded."""
    head = tl.arange(0, dq.shape[0])
    row = offset_of(token, HEADS) + head
    offs_d = tl.arange(0, dq.shape[1])[None, :]
    dq = dq.to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + offset_of(row[:, None], dq.shape[1]) + offs_d, dq, mask=(head < HEADS)[:, None])
    tl.store(dweights_ptr + row, dweights, mask=head < HEADS)


@triton.jit
def load_lse(lse_ptr, token, ATTENTION: tl.constexpr):
    """Binary lse [BLOCK_H] f32 of a token's attention heads; inf for a head without keys and past the last."""
    head = tl.arange(0, ATTENTION.BLOCK_H)
    lse_row = lse_ptr + offset_of(token, ATTENTION.LSE_STRIDE)
    lse = tl.load(lse_row + head, mask=head < ATTENTION.HEADS, other=float("inf"))
    # A large number stays one: infinity stands for no keys.
    binary = tl.clamp(lse * LOG2E, -LARGEST, LARGEST, tl.PropagateNan.ALL)
    return tl.where(tl.abs(lse) == float("inf"), float("inf"), binary)


@triton.jit
def attention_target(q_ptr, rows_ptr, lse, token, key, ok, ATTENTION: tl.constexpr):
    """Σ_h exp(SCALE · q_h · row − lse_h) of a token over keys [BLOCK_N], f32; 0 where not ok."""
    HEADS: tl.constexpr = ATTENTION.HEADS
    head = tl.arange(0, lse.shape[0])
    offs_c = tl.arange(0, CHUNK)
    q_row = q_ptr + offset_of(token, ATTENTION.Q_STRIDE_T) + offset_of(head[:, None], ATTENTION.Q_STRIDE_H, HEADS)
    q_row += offs_c[None, :]
    row = rows_ptr + offset_of(key[:, None], ATTENTION.ROW_STRIDE) + offs_c[None, :]
    scores = tl.zeros([lse.shape[0], key.shape[0]], tl.float32)
    for first in tl.range(0, ATTENTION.DIMS, CHUNK):
        q = tl.load(q_row + first, mask=(head < HEADS)[:, None], other=0.0)
        chunk = tl.load(row + first, mask=ok[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(chunk), scores)
    p = tl.exp2(scores * (ATTENTION.SCALE * LOG2E) - lse[:, None])
    return tl.where(ok, tl.sum(tl.where(lse[:, None] == float("inf"), 0.0, p), 0), 0.0)
