"""The indexer's loss and its gradients.

    bound_kernel           a program takes a token: of each of its keys the bound of a summand of the gradient
    ── all tokens have ended: the unit of each key's sums is known ──
    then for the tokens of a part, whose target is stored, if none is given:
    indexer_target_kernel  at indices, `indexer_target`'s
    range_target_kernel    over ranges: a program takes a token and a tile of keys
    measure_kernel         a program takes a token: Σ exp I and the target's sum
    indexer_loss_kernel    a program takes a token: prediction and target of each key, the token's loss, dindex_q and
                           dindex_weights, and of each key a summand, added in integers
    ── all parts ──
    average_kernel         the mean of the tokens' losses

What a program does with a tile of keys is in `lang.scores`; sums in integers are in `lang.sums`.
"""

import triton
import triton.language as tl

from xmla.core.lang.numbers import LN2, LOG2E
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.scores import (
    attention_target,
    bound_sums,
    columns_of,
    differentiate,
    greatest_slope,
    indices_of,
    key_range,
    load_lse,
    load_query,
    score,
    store_gradients,
)

LEAST = tl.constexpr(1e-10)  # of the target inside its logarithm
GREATEST_DIFFERENCE = tl.constexpr(2.0)  # of prediction and target; distributions differ by 1 at most


@triton.jit
def bound_kernel(
    index_q_ptr,  # [T, I, D]
    index_weights_ptr,  # [T, I] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32 if COLUMNS.HAS_INDICES
    num_tokens,  # T
    num_keys,  # N
    num_columns,  # K or N
    bounds_ptr,  # [N] i32, the bits of floats: of the greatest summand of each key's gradient
    C: tl.constexpr,  # Gradient
):
    COLUMNS: tl.constexpr = C.COLUMNS
    BLOCK_N: tl.constexpr = C.BLOCK_N
    token = tl.program_id(0).to(tl.int64)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, COLUMNS)
    count = num_columns if COLUMNS.HAS_INDICES else tl.maximum(end - start, 0)
    indices_row = indices_of(indices_ptr, token, COLUMNS)
    q, weights = load_query(index_q_ptr, index_weights_ptr, token, C.INDEXER)
    bound = greatest_slope(q, weights) * (GREATEST_DIFFERENCE * tl.abs(C.COEFF / num_tokens))
    for first in tl.range(0, count, BLOCK_N):
        _, key, ok = columns_of(first, start, end, indices_row, num_columns, COLUMNS, BLOCK_N)
        bound_sums(bounds_ptr, bound + tl.zeros([BLOCK_N], tl.float32), key, ok)


@triton.jit
def range_target_kernel(
    q_ptr,  # [T, H, L+E]
    rows_ptr,  # [N, L+E]
    lse_ptr,  # [T, H] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    first_token,
    part_tokens,  # from first_token on
    num_keys,  # N
    target_ptr,  # [part_tokens, N] f32, written within a token's range
    C: tl.constexpr,  # RangeTarget
):
    BLOCK_N: tl.constexpr = C.BLOCK_N
    # Neighbouring programs have the same keys and consecutive tokens, then the same tokens and other keys.
    blocks = tl.cdiv(num_keys, BLOCK_N)
    turn = tl.program_id(0) // (blocks * C.TURN)
    place = tl.program_id(0) % (blocks * C.TURN)
    row = tl.minimum(turn * C.TURN + place % C.TURN, part_tokens - 1)
    token = first_token + row.to(tl.int64)
    first_key = place // C.TURN * BLOCK_N
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, C.COLUMNS)
    past = turn * C.TURN + place % C.TURN >= part_tokens
    if past | (start >= first_key + BLOCK_N) | (end <= first_key):
        return
    key = first_key + tl.arange(0, BLOCK_N)
    ok = (key >= start) & (key < end)
    lse = load_lse(lse_ptr, token, C.ATTENTION)
    target = attention_target(q_ptr, rows_ptr, lse, token, key, ok, C.ATTENTION)
    tl.store(target_ptr + offset_of(row, num_keys) + key, target, mask=ok)


@triton.jit
def target_row(target_ptr, row, num_columns, C: tl.constexpr):
    """Pointer to the target of a part's token: over ranges rows are as long as there are keys."""
    if C.COLUMNS.HAS_INDICES:
        return target_ptr + offset_of(row, C.TARGET_STRIDE)
    else:
        return target_ptr + offset_of(row, num_columns)


@triton.jit
def add_exponentials(total, greatest, scores):
    """Add a tile of scores [BLOCK_N] to Σ exp(scores), which is in units of the greatest scores' exponentials."""
    before, greatest = greatest, tl.maximum(greatest, scores)
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    # Differences are multiplied, not scores: those beyond 2.3e38 would overflow.
    return total * tl.exp2((before - base) * LOG2E) + tl.exp2((scores - base) * LOG2E), greatest


@triton.jit
def logarithm_of_sum(total, greatest):
    """ln Σ exp(scores) of what `add_exponentials` returned."""
    top = tl.max(greatest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(total * tl.exp2((greatest - top) * LOG2E), 0)  # of a lane without columns: 0 times 0
    return top + tl.log2(total) * LN2


@triton.jit
def measure_kernel(
    index_q_ptr,  # [T, I, D]
    index_k_ptr,  # [N, D]
    index_weights_ptr,  # [T, I] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32 if COLUMNS.HAS_INDICES
    target_ptr,  # [T − first_token, K or N] f32
    first_token,
    num_keys,  # N
    num_columns,  # K or N
    total_ptr,  # [T] f32: the logarithm of the denominator of the prediction's softmax
    mass_ptr,  # [T] f32: the sum of the target; 0 for a token that adds nothing
    C: tl.constexpr,  # Measurement
):
    INDEXER: tl.constexpr = C.INDEXER
    COLUMNS: tl.constexpr = C.COLUMNS
    BLOCK_N: tl.constexpr = C.BLOCK_N
    token = first_token + tl.program_id(0).to(tl.int64)
    target_ptr = target_row(target_ptr, tl.program_id(0), num_columns, C)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, COLUMNS)
    count = num_columns if COLUMNS.HAS_INDICES else tl.maximum(end - start, 0)
    indices_row = indices_of(indices_ptr, token, COLUMNS)
    q, weights = load_query(index_q_ptr, index_weights_ptr, token, INDEXER)
    greatest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    mass = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.range(0, count, BLOCK_N):
        column, key, ok = columns_of(first, start, end, indices_row, num_columns, COLUMNS, BLOCK_N)
        mass += tl.load(target_ptr + column, mask=ok, other=0.0)
        _, _, scores = score(q, index_k_ptr, weights, key, ok, INDEXER.K_STRIDE)
        scores = tl.where(ok, scores, float("-inf"))
        total, greatest = add_exponentials(total, greatest, scores)
    tl.store(total_ptr + token, logarithm_of_sum(total, greatest))
    tl.store(mass_ptr + token, tl.sum(mass, 0))


@triton.jit
def indexer_loss_kernel(
    index_q_ptr,  # [T, I, D]
    index_k_ptr,  # [N, D]
    index_weights_ptr,  # [T, I] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32 if COLUMNS.HAS_INDICES
    target_ptr,  # [T − first_token, K or N] f32
    bounds_ptr,  # [N] i32
    total_ptr,  # [T] f32
    mass_ptr,  # [T] f32
    first_token,
    num_tokens,  # T
    num_keys,  # N
    num_columns,  # K or N
    log2_parts,  # binary logarithm of the number of summands of a key's gradient, rounded up
    marks_ptr,  # [N] i8, 1 for a key whose gradient is NaN
    sums_ptr,  # [N, 2·D] i32
    losses_ptr,  # [T] f32
    dindex_q_ptr,  # [T, I, D]
    dindex_weights_ptr,  # [T, I] f32
    C: tl.constexpr,  # Loss
):
    INDEXER: tl.constexpr = C.INDEXER
    COLUMNS: tl.constexpr = C.COLUMNS
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_I: tl.constexpr = INDEXER.BLOCK_I
    D: tl.constexpr = INDEXER.D
    token = first_token + tl.program_id(0).to(tl.int64)
    target_ptr = target_row(target_ptr, tl.program_id(0), num_columns, C)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, COLUMNS)
    count = num_columns if COLUMNS.HAS_INDICES else tl.maximum(end - start, 0)
    indices_row = indices_of(indices_ptr, token, COLUMNS)
    total = tl.load(total_ptr + token)
    mass = tl.load(mass_ptr + token)
    count = tl.where(mass == 0.0, 0, count)
    if not COLUMNS.HAS_INDICES:
        # The range's first key becomes key 0, as without starts: addresses of 64 bits a key would spill.
        index_k_ptr += offset_of(start, INDEXER.K_STRIDE)
        bounds_ptr += start
        marks_ptr += start
        sums_ptr += offset_of(start, 2 * D)
        target_ptr += start
        end -= start
        start = 0
    q, weights = load_query(index_q_ptr, index_weights_ptr, token, INDEXER)
    finite = greatest_slope(q, weights) < float("inf")
    dq = tl.zeros([BLOCK_I, D], tl.float32)
    dweights = tl.zeros([BLOCK_I], tl.float32)
    loss = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.range(0, count, BLOCK_N):
        column, key, ok = columns_of(first, start, end, indices_row, num_columns, COLUMNS, BLOCK_N)
        target = tl.load(target_ptr + column, mask=ok, other=0.0)
        keys, dots, scores = score(q, index_k_ptr, weights, key, ok, INDEXER.K_STRIDE)
        log_prediction = scores - total
        prediction = tl.exp2(log_prediction * LOG2E)
        target = target / mass
        log_target = tl.log(tl.maximum(target, LEAST, tl.PropagateNan.ALL))
        # The target is 0 where not ok. 0 times the logarithm of 0 is 0.
        loss += tl.where(target == 0.0, 0.0, target * (log_target - log_prediction))
        apart = tl.where(ok, prediction - target, 0.0)
        right = tl.where(tl.abs(apart) <= GREATEST_DIFFERENCE, finite, False)
        dq, dweights = differentiate(
            q, weights, keys, dots, apart * (C.COEFF / num_tokens), key, ok, right, dq, dweights, log2_parts,
            bounds_ptr, marks_ptr, sums_ptr,
        )  # fmt: skip
    tl.store(losses_ptr + token, tl.sum(loss, 0))
    store_gradients(dindex_q_ptr, dindex_weights_ptr, token, dq, dweights, INDEXER.HEADS)


@triton.jit
def average_kernel(
    losses_ptr,  # [T] f32
    num_tokens,  # T
    loss_ptr,  # [1] f32
    COEFF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, num_tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + token, mask=token < num_tokens, other=0.0)
    tl.store(loss_ptr, tl.sum(total, 0) * (COEFF / tl.maximum(num_tokens, 1)))
