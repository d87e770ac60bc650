"""The indexer's loss by products of tokens with all keys that they may see, or with those between selected ones.

    extent_kernel          with indices: the range of each token's keys
    finite_kernel          with indices: blocks of keys that are finite
    for the tokens of a part, whose pairs fit the workspace:
    the target, if none is given, as `indexer_loss` writes it
    indexer_scores_kernel  the scores over ranges, `indexer_scores`'s
    compare_ranges_kernel, compare_columns_kernel
                           a program takes a token: its loss, and prediction − target in place of its scores
    query_gradient_kernel  a program takes a token: dindex_q and dindex_weights
    key_gradient_kernel    a program takes a tile of keys and a chain of tokens: adds to the chain's dindex_k
    ── all parts ──
    add_chains_kernel      dindex_k
    average_kernel         the mean of the tokens' losses

A chain is some consecutive tokens of the call. Its sum goes on from part to part, in the order of tokens.

A pair that does not count is 0 in a token's row, or −inf beyond its range, and one that counts is not: where prediction
and target are equal, it is the least normal number. With indices, columns of a key add up in any order, as integers.
"""

import triton
import triton.language as tl

from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.scores import columns_of, greatest_slope, key_range, load_query, store_gradients
from xmla.core.ops.training.indexer_loss.kernels import (
    GREATEST_DIFFERENCE,
    LEAST,
    add_exponentials,
    logarithm_of_sum,
)

UNIT = tl.constexpr(2.0**-29)  # of integers: the differences of a token's columns add up to 2 at most
NAN = tl.constexpr(-(2**31))  # as an integer
LEAST_NORMAL = tl.constexpr(2.0**-126)
FINITE_KEYS = tl.constexpr(64)  # of a block


@triton.jit
def extent_kernel(
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32
    num_keys,  # N
    num_columns,  # K
    firsts_ptr,  # [T] i32: the least key of a valid column
    lasts_ptr,  # [T] i32: one past the greatest
    COLUMNS: tl.constexpr,  # Indices
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, COLUMNS)
    indices_row = indices_ptr + offset_of(token, COLUMNS.INDEX_STRIDE)
    least = tl.full([BLOCK_N], 2**31 - 1, tl.int32)
    most = tl.zeros([BLOCK_N], tl.int32)
    for first in tl.range(0, num_columns, BLOCK_N):
        _, key, ok = columns_of(first, start, end, indices_row, num_columns, COLUMNS, BLOCK_N)
        least = tl.minimum(least, tl.where(ok, key, 2**31 - 1))
        most = tl.maximum(most, tl.where(ok, key + 1, 0))
    tl.store(firsts_ptr + token, tl.minimum(tl.min(least, 0), num_keys))
    tl.store(lasts_ptr + token, tl.max(most, 0))


@triton.jit
def finite_kernel(
    index_k_ptr,  # [N, D]
    num_keys,  # N
    finite_keys_ptr,  # [N / FINITE_KEYS] i8, 1 where all keys of a block are finite
    K_STRIDE: tl.constexpr,
    D: tl.constexpr,
):
    BLOCK: tl.constexpr = FINITE_KEYS
    key = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k_ptrs = index_k_ptr + offset_of(key[:, None], K_STRIDE) + tl.arange(0, D)[None, :]
    keys = tl.load(k_ptrs, mask=(key < num_keys)[:, None], other=0.0)
    zero = tl.sum(tl.sum(keys.to(tl.float32) * 0.0, 1), 0)
    tl.store(finite_keys_ptr + tl.program_id(0), (zero == 0.0).to(tl.int8))


@triton.jit
def measure(
    pairs_row, target_row, indices_row, start, end, count, num_columns, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The logarithm of the denominator of a token's softmax, and the sum of its target."""
    greatest = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    mass = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.range(0, count, BLOCK_N):
        column, key, ok = columns_of(first, start, end, indices_row, num_columns, COLUMNS, BLOCK_N)
        mass += tl.load(target_row + column, mask=ok, other=0.0)
        scores = tl.load(pairs_row + key, mask=ok, other=float("-inf"))
        total, greatest = add_exponentials(total, greatest, scores)
    return logarithm_of_sum(total, greatest), tl.sum(mass, 0)


@triton.jit
def compare(scores, target, total, mass, ok):
    """Prediction − target of columns [BLOCK_N], and what they add to a token's loss."""
    target = target / mass
    log_prediction = scores - total
    log_target = tl.log(tl.maximum(target, LEAST, tl.PropagateNan.ALL))
    # 0 times the logarithm of 0 is 0.
    loss = tl.where(ok, tl.where(target == 0.0, 0.0, target * (log_target - log_prediction)), 0.0)
    return tl.exp2(log_prediction * LOG2E) - target, loss


@triton.jit
def compare_ranges_kernel(
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    target_ptr,  # [part, N] f32
    first_token,
    num_keys,  # N
    pairs_ptr,  # [part, N] f32: scores, then prediction − target
    losses_ptr,  # [T] f32
    mass_ptr,  # [T] f32: the sum of the target; 0 for a token that adds nothing
    COLUMNS: tl.constexpr,  # Ranges
    BLOCK_N: tl.constexpr,
):
    row = offset_of(tl.program_id(0), num_keys)
    token = first_token + tl.program_id(0)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, COLUMNS)
    count = tl.maximum(end - start, 0)
    total, mass = measure(pairs_ptr + row, target_ptr + row, target_ptr, start, end, count, num_keys, COLUMNS, BLOCK_N)
    loss = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.range(0, count, BLOCK_N):
        key = start + first + tl.arange(0, BLOCK_N)
        ok = key < end
        target = tl.load(target_ptr + row + key, mask=ok, other=0.0)
        scores = tl.load(pairs_ptr + row + key, mask=ok, other=0.0)
        apart, terms = compare(scores, target, total, mass, ok)
        loss += terms
        apart = tl.where(apart == 0.0, LEAST_NORMAL, apart)
        tl.store(pairs_ptr + row + key, tl.where(mass == 0.0, 0.0, apart), mask=ok)
    tl.store(losses_ptr + token, tl.where(mass == 0.0, 0.0, tl.sum(loss, 0)))
    tl.store(mass_ptr + token, mass)


@triton.jit
def compare_columns_kernel(
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32
    target_ptr,  # [T or part, K] f32
    firsts_ptr,  # [T] i32
    lasts_ptr,  # [T] i32
    first_token,
    first_target,  # its row in the target
    num_keys,  # N
    num_columns,  # K
    pairs_ptr,  # [part, N] f32: scores, then integers of prediction − target
    columns_ptr,  # [part, K] f32: prediction − target of a column
    losses_ptr,  # [T] f32
    mass_ptr,  # [T] f32: the sum of the target; 0 for a token that adds nothing
    TARGET_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,  # Indices
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    token = first_token + row.to(tl.int64)
    target_ptr += offset_of(first_target + row, TARGET_STRIDE)
    pairs_ptr += offset_of(row, num_keys)
    columns_ptr += offset_of(row, num_columns)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, COLUMNS)
    indices_row = indices_ptr + offset_of(token, COLUMNS.INDEX_STRIDE)
    total, mass = measure(pairs_ptr, target_ptr, indices_row, start, end, num_columns, num_columns, COLUMNS, BLOCK_N)
    loss = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.range(0, num_columns, BLOCK_N):
        column, key, ok = columns_of(first, start, end, indices_row, num_columns, COLUMNS, BLOCK_N)
        target = tl.load(target_ptr + column, mask=ok, other=0.0)
        scores = tl.load(pairs_ptr + key, mask=ok, other=0.0)
        apart, terms = compare(scores, target, total, mass, ok)
        loss += terms
        tl.store(columns_ptr + column, apart, mask=ok)
    tl.store(losses_ptr + token, tl.where(mass == 0.0, 0.0, tl.sum(loss, 0)))
    tl.store(mass_ptr + token, mass)
    pairs = pairs_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    first_key = tl.load(firsts_ptr + token)
    last_key = tl.load(lasts_ptr + token)
    tl.debug_barrier()  # all scores are read
    for first in tl.range(0, last_key - first_key, BLOCK_N):
        key = first_key + first + tl.arange(0, BLOCK_N)
        tl.store(pairs + key, tl.zeros([BLOCK_N], tl.int32), mask=key < last_key)
    tl.debug_barrier()
    count = tl.where(mass == 0.0, 0, num_columns)
    wrong = tl.zeros([BLOCK_N], tl.int1)
    for first in tl.range(0, count, BLOCK_N):
        column, key, ok = columns_of(first, start, end, indices_row, num_columns, COLUMNS, BLOCK_N)
        apart = tl.load(columns_ptr + column, mask=ok, other=0.0)
        right = tl.abs(apart) <= GREATEST_DIFFERENCE
        wrong |= ok & (right == 0)
        units = 2 * tl.floor(tl.where(right, apart, 0.0) * (0.5 / UNIT)).to(tl.int32) + 1
        tl.atomic_add(pairs + key, units, mask=ok & right, sem="relaxed")
    if tl.max(wrong.to(tl.int32), 0) != 0:
        tl.debug_barrier()  # NaN stays, whatever is added
        for first in tl.range(0, count, BLOCK_N):
            column, key, ok = columns_of(first, start, end, indices_row, num_columns, COLUMNS, BLOCK_N)
            apart = tl.load(columns_ptr + column, mask=ok, other=0.0)
            right = tl.abs(apart) <= GREATEST_DIFFERENCE
            tl.store(pairs + key, tl.full([BLOCK_N], NAN, tl.int32), mask=ok & (right == 0))
    tl.debug_barrier()
    for first in tl.range(0, last_key - first_key, BLOCK_N):
        key = first_key + first + tl.arange(0, BLOCK_N)
        units = tl.load(pairs + key, mask=key < last_key, other=0)
        apart = tl.where(units == NAN, float("nan"), units.to(tl.float32) * UNIT)
        tl.store(pairs_ptr + key, apart, mask=key < last_key)


@triton.jit
def query_gradient_kernel(
    index_q_ptr,  # [T, I, D]
    index_k_ptr,  # [N, D]
    index_weights_ptr,  # [T, I] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    pairs_ptr,  # [part, N] f32
    mass_ptr,  # [T] f32
    finite_keys_ptr,  # [N / FINITE_KEYS] i8 if SELECTED
    first_token,
    num_rows,  # tokens of the part
    num_tokens,  # T
    num_keys,  # N
    dindex_q_ptr,  # [T, I, D]
    dindex_weights_ptr,  # [T, I] f32
    finite_ptr,  # [T] i8, 1 for a token whose queries and weights are
    C: tl.constexpr,  # Gradient
    SELECTED: tl.constexpr,  # not all keys of a range count
    MASKED: tl.constexpr,  # keys that do not count are not read, for the product of 0 and NaN is none
):
    """Gradients of tokens whose keys are finite, or if MASKED of the others.

    Copies of keys wait for nothing if all are read. Both in one kernel, ptxas would serialise its products.
    """
    INDEXER: tl.constexpr = C.INDEXER
    BLOCK_I: tl.constexpr = INDEXER.BLOCK_I
    D: tl.constexpr = INDEXER.D
    BLOCK_N: tl.constexpr = C.BLOCK_N
    row = num_rows - 1 - tl.program_id(0)  # causal tokens with the most keys first
    token = first_token + row.to(tl.int64)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, C.COLUMNS)
    end = tl.where(tl.load(mass_ptr + token) == 0.0, start, end)
    if SELECTED:
        first_block = start // FINITE_KEYS
        blocks = tl.cdiv(end, FINITE_KEYS) - first_block
        all_finite = 1
        for first in tl.range(0, blocks, 1024):
            block = first + tl.arange(0, 1024)
            finite = tl.load(finite_keys_ptr + first_block + block, mask=block < blocks, other=1)
            all_finite = tl.minimum(all_finite, tl.min(finite.to(tl.int32), 0))
        if (all_finite == 1) == MASKED:
            return
    q, weights = load_query(index_q_ptr, index_weights_ptr, token, INDEXER)
    tl.store(finite_ptr + token, (greatest_slope(q, weights) < float("inf")).to(tl.int8))
    # The range's first key becomes key 0: a row's bits do not depend on where it stands.
    index_k_ptr += offset_of(start, INDEXER.K_STRIDE)
    pairs_ptr += offset_of(row, num_keys) + start
    count = end - start
    offs_d = tl.arange(0, D)
    dq = tl.zeros([BLOCK_I, D], tl.float32)
    dweights = tl.zeros([BLOCK_I], tl.float32)
    for first in tl.range(0, count, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        apart = tl.load(pairs_ptr + key, mask=key < count, other=0.0)
        read = apart != 0.0 if MASKED else key < count
        k_ptrs = index_k_ptr + offset_of(key[:, None], INDEXER.K_STRIDE) + offs_d[None, :]
        keys = tl.load(k_ptrs, mask=read[:, None], other=0.0)
        dots = tl.dot(q, tl.trans(keys))
        # The derivative at 0 is 0, as in the frameworks' relu; that of NaN is not.
        dq = tl.dot(tl.where(dots <= 0.0, 0.0, apart[None, :]).to(keys.dtype), keys, dq)
        dweights += tl.sum(tl.maximum(dots, 0.0, tl.PropagateNan.ALL) * apart[None, :], 1)
    scale = C.COEFF / num_tokens
    dq = tl.where(dq == 0.0, 0.0, dq * (weights * scale)[:, None])  # of no products 0, whatever the weight
    store_gradients(dindex_q_ptr, dindex_weights_ptr, token, dq, dweights * scale, INDEXER.HEADS)


@triton.jit
def key_gradient_kernel(
    index_q_ptr,  # [T, I, D]
    index_k_ptr,  # [N, D]
    index_weights_ptr,  # [T, I] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    pairs_ptr,  # [part, N] f32
    finite_ptr,  # [T] i8
    first_token,
    num_rows,  # tokens of the part
    chain_tokens,  # tokens of a chain
    num_keys,  # N
    chains_ptr,  # [chains, N, D] f32
    C: tl.constexpr,  # Products
    SEGMENT: tl.constexpr,  # tokens whose products are one sum
):
    INDEXER: tl.constexpr = C.INDEXER
    HEADS: tl.constexpr = INDEXER.HEADS
    D: tl.constexpr = INDEXER.D
    BLOCK_N: tl.constexpr = C.BLOCK_N
    SCANNED: tl.constexpr = 256  # tokens
    tiles = tl.cdiv(num_keys, BLOCK_N)
    first_key = tl.program_id(0) % tiles * BLOCK_N
    chain = first_token // chain_tokens + tl.program_id(0) // tiles
    first = tl.maximum(chain * chain_tokens, first_token)
    count = tl.minimum((chain + 1) * chain_tokens, first_token + num_rows) - first
    # The tokens of which each may see a key of the tile, and those between them.
    seeing = tl.full([SCANNED], 2**31 - 1, tl.int32)
    seen = tl.zeros([SCANNED], tl.int32)
    for place in tl.range(0, count, SCANNED):
        step = place + tl.arange(0, SCANNED)
        start, end = key_range(starts_ptr, ends_ptr, first + tl.minimum(step, count - 1), num_keys, C.COLUMNS)
        sees = (step < count) & (tl.minimum(end, first_key + BLOCK_N) > tl.maximum(start, first_key))
        seeing = tl.minimum(seeing, tl.where(sees, step, 2**31 - 1))
        seen = tl.maximum(seen, tl.where(sees, step + 1, 0))
    seeing = tl.minimum(tl.min(seeing, 0), count)
    seen = tl.max(seen, 0)
    offs_d = tl.arange(0, D)
    key = first_key + tl.arange(0, BLOCK_N)
    inside = key < num_keys
    sums = chains_ptr + (offset_of(chain, D) * num_keys + offset_of(key, D))[:, None] + offs_d[None, :]
    if first == chain * chain_tokens:
        tl.store(sums, tl.zeros([BLOCK_N, D], tl.float32), mask=inside[:, None])
        tl.debug_barrier()
    k_ptrs = index_k_ptr + offset_of(key[:, None], INDEXER.K_STRIDE) + offs_d[None, :]
    keys = tl.load(k_ptrs, mask=inside[:, None], other=0.0)
    head = tl.arange(0, INDEXER.BLOCK_I)
    q_offsets = offset_of(head[:, None], INDEXER.Q_STRIDE_I, HEADS) + offs_d[None, :]
    # Products are summed with too few bits for many tokens.
    skipped = seeing // SEGMENT * SEGMENT
    for place in tl.range(0, seen - skipped, SEGMENT):
        step = tl.maximum(skipped + place, seeing)
        count = tl.minimum(skipped + place + SEGMENT, seen) - step
        token = (first + step).to(tl.int64)
        q_row = index_q_ptr + offset_of(token, INDEXER.Q_STRIDE_T)
        weights_row = index_weights_ptr + offset_of(token, INDEXER.WEIGHT_STRIDE)
        pairs_row = pairs_ptr + offset_of(token - first_token, num_keys)
        finite_row = finite_ptr + token
        dkeys = tl.zeros([BLOCK_N, D], tl.float32)
        for _ in tl.range(0, count):
            finite = tl.load(finite_row) != 0
            used = head < tl.where(finite, HEADS, 0)
            q = tl.load(q_row + q_offsets, mask=used[:, None], other=0.0)
            weights = tl.load(weights_row + head, mask=used, other=0.0)
            apart = tl.load(pairs_row + key, mask=inside, other=0.0)
            apart = tl.where(apart == float("-inf"), 0.0, apart)
            right = tl.abs(apart) <= tl.where(finite, GREATEST_DIFFERENCE, 0.0)
            dots = tl.dot(keys, tl.trans(q))
            # NaN in a row of the product stays in that key's. Weights are masked: ptxas would mask products last.
            slopes = tl.where(dots <= 0.0, 0.0, weights[None, :])
            ddots = tl.where(right, apart, float("nan"))[:, None] * slopes
            dkeys = tl.dot(ddots.to(q.dtype), q, dkeys)
            q_row += INDEXER.Q_STRIDE_T
            weights_row += INDEXER.WEIGHT_STRIDE
            pairs_row += num_keys
            finite_row += 1
        tl.atomic_add(sums, dkeys, mask=inside[:, None], sem="relaxed")  # no other program's


@triton.jit
def add_chains_kernel(
    chains_ptr,  # [chains, N, D] f32
    num_tokens,  # T
    num_elements,  # N · D
    num_chains,
    dindex_k_ptr,  # [N, D]
    COEFF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    inside = place < num_elements
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, num_chains):
        total += tl.load(chains_ptr + place, mask=inside, other=0.0)
        chains_ptr += num_elements
    dindex_k = total * (COEFF / num_tokens)
    tl.store(dindex_k_ptr + place, dindex_k.to(dindex_k_ptr.dtype.element_ty), mask=inside)
