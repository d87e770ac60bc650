"""Indexer logits and top-k in one pass, in memory that does not depend on the number of keys.

A program scores its tokens' keys one block at a time into its own scratch memory, in a loop that only multiplies. Then
it appends the keys that can still be among the k largest to its tokens' candidates: every key at first, later only keys
above the k-th largest so far. Before their space of CAPACITY is full, `keep_largest` removes the candidates that are no
longer among the k largest. Candidates are always in ascending order of their keys' positions, so a key that ties with
the k-th largest but comes later is left out, as the total order requires. Keys in random order of score append
k · (1 + ln(N / k)) candidates in all; keys in ascending order of score append all of them, which costs time but gives
the same result.
"""

import triton
import triton.language as tl

from xmla.core.lang.indexer import head_scores, heads_of_tile, load_keys, load_query
from xmla.core.lang.numbers import as_bytes
from xmla.core.lang.offsets import offset_of
from xmla.core.ops.selection.select_topk.choose import choose_candidates, lanes_by_warp, running_count
from xmla.core.ops.selection.select_topk.pairs import KEY_OF_INF, as_packed, key_of
from xmla.core.ops.selection.select_topk.search import kth_largest
from xmla.core.ops.selection.select_topk.tile import COLUMNS_A_WARP, append_tile, load_tile


@triton.jit
def keep_largest(candidates, count, C: tl.constexpr):
    """Reduce `count` > K candidates to the K largest, in place and in order; return the order key of the least."""
    K: tl.constexpr = C.K
    WARPS: tl.constexpr = C.WARPS
    keys = load_keys_of(candidates, lanes_by_warp(C.CAPACITY), count)
    low, high = tl.full([], 1, tl.uint32), tl.full([], KEY_OF_INF + 1, tl.uint32)
    threshold, _ = kth_largest(keys, K, low, high, count, 1, 0)
    ties = K - tl.sum((keys > threshold).to(tl.int32))
    written = 0
    seen_equal = 0
    part = lanes_by_warp(WARPS * 128)
    for base in tl.range(0, count, WARPS * 128):
        pair = tl.load(candidates + base + part, mask=base + part < count, other=0)
        key = tl.where(base + part < count, key_of(pair), 0)
        equal = key == threshold
        rank, equals = running_count(equal)
        chosen = (key > threshold) | (equal & (seen_equal + rank <= ties))
        place, more = running_count(chosen)
        tl.debug_barrier()  # a part is read before it is overwritten
        tl.store(candidates + written + place - 1, pair, mask=chosen)
        seen_equal += equals
        written += more
    tl.debug_barrier()
    return threshold


@triton.jit
def load_keys_of(candidates, lane, count):
    """Order keys of the candidates at `lane`; those past `count` are 0."""
    pair = tl.load(candidates + lane, mask=lane < count, other=0)
    return tl.where(lane < count, key_of(pair), 0)


@triton.jit
def take_block(candidates, scores, column, lengths, counts, thresholds, STRIDE: tl.constexpr, C: tl.constexpr):
    """Append a block's scores [GROUP, BLOCK] to the tokens' candidates, STRIDE apart; return counts and thresholds.

    column, lengths, counts, thresholds [GROUP]: of the block's first key, within the token's range; of that range.
    """
    GROUP: tl.constexpr = C.GROUP
    BLOCK: tl.constexpr = C.BLOCK
    CAPACITY: tl.constexpr = C.CAPACITY
    WARPS: tl.constexpr = C.WARPS
    member = tl.arange(0, GROUP)
    tl.debug_barrier()  # all scores are stored
    for g in tl.range(0, GROUP):
        count = tl.sum(tl.where(member == g, counts, 0))
        threshold = tl.sum(tl.where(member == g, thresholds, 0).to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True)
        space = candidates + offset_of(g, STRIDE, GROUP)
        if count > CAPACITY - BLOCK:
            threshold = keep_largest(space, count, C)
            count = tl.full([], C.K, tl.int32)
        first = tl.sum(tl.where(member == g, column, 0))
        length = tl.sum(tl.where(member == g, lengths, 0))
        for at in tl.range(0, BLOCK, WARPS * COLUMNS_A_WARP):
            last = tl.minimum(length - first, BLOCK) - at
            tile = load_tile(scores + offset_of(g, BLOCK, GROUP) + at, last, False, WARPS, 1)
            count = append_tile(
                space, count, CAPACITY, tile, first + at, -first - at, last, threshold, 0.0, False, True, WARPS
            )
        counts = tl.where(member == g, count, counts)
        thresholds = tl.where(member == g, threshold, thresholds)
    tl.debug_barrier()  # the next block overwrites the scores
    return counts, thresholds


@triton.jit
def write_indices(candidates, count, out, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The columns of `count` ≤ K candidates, then −1."""
    for first in tl.range(0, K, BLOCK_K):
        lane = first + tl.arange(0, BLOCK_K)
        pair = tl.load(candidates + lane, mask=lane < count, other=0xFFFFFFFF)
        tl.store(out + lane, pair.to(tl.uint32).to(tl.int32, bitcast=True), mask=lane < K)


@triton.jit
def indexer_topk_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3 | [N, D/2] bytes
    key_scales_ptr,  # [N] f32 | i32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    num_tokens,
    num_keys,
    num_groups,  # of GROUP tokens
    indices_ptr,  # [T, K] i32
    candidates_ptr,  # [programs, GROUP, CAPACITY] pairs, columns relative to the token's start
    scores_ptr,  # [programs, GROUP, BLOCK] f32
    C: tl.constexpr,  # RaggedTopk
):
    QUERY: tl.constexpr = C.QUERY
    HEADS: tl.constexpr = QUERY.HEADS
    D: tl.constexpr = QUERY.D
    BLOCK_I: tl.constexpr = QUERY.BLOCK_I
    K: tl.constexpr = C.K
    GROUP: tl.constexpr = C.GROUP
    CAPACITY: tl.constexpr = C.CAPACITY
    BLOCK: tl.constexpr = C.BLOCK
    BLOCK_N: tl.constexpr = C.BLOCK_N
    offs_d = tl.arange(0, D)
    offs_n = tl.arange(0, BLOCK_N)
    member = tl.arange(0, GROUP)
    row_member, row_head = heads_of_tile(GROUP, BLOCK_I, C.KEYS.RUN)  # of each row of q
    candidates = as_packed(candidates_ptr) + offset_of(tl.program_id(0), GROUP * CAPACITY)
    scores_out = scores_ptr + offset_of(tl.program_id(0), GROUP * BLOCK)
    for step in tl.range(0, tl.cdiv(num_groups - tl.program_id(0), tl.num_programs(0))):
        first_token = (tl.program_id(0) + step * tl.num_programs(0)) * GROUP
        row_token = (first_token + row_member).to(tl.int64)
        row_ok = (row_head < HEADS) & (row_token < num_tokens)
        q_row = offset_of(row_token, QUERY.Q_STRIDE_T) + offset_of(row_head, QUERY.Q_STRIDE_I, HEADS)
        q = load_query(q8_ptr + q_row[:, None] + offs_d[None, :], row_ok[:, None])
        weights = tl.load(weights_ptr + offset_of(row_token, QUERY.WEIGHT_STRIDE) + row_head, mask=row_ok, other=0.0)

        token = first_token + member
        token_ok = token < num_tokens
        start = tl.minimum(tl.maximum(tl.load(starts_ptr + token, mask=token_ok, other=num_keys), 0), num_keys)
        end = tl.maximum(tl.minimum(tl.load(ends_ptr + token, mask=token_ok, other=0), num_keys), start)
        first_key = tl.min(start)
        last_key = tl.max(end)
        counts = tl.zeros([GROUP], tl.int32)
        thresholds = tl.zeros([GROUP], tl.uint32)
        for block in tl.range(0, tl.cdiv(last_key - first_key, BLOCK)):
            block_key = first_key + block * BLOCK
            for tile in tl.range(0, tl.cdiv(tl.minimum(BLOCK, last_key - block_key), BLOCK_N)):
                key = block_key + tile * BLOCK_N + offs_n
                key_row = offset_of(key, C.KEY_STRIDE)
                scale_ptrs = as_bytes(key_scales_ptr) + offset_of(key, 4)
                keys, factors = load_keys(keys_ptr, key_row, scale_ptrs, key < last_key, D, C.KEYS.FORMAT)
                scores = head_scores(keys, q, weights, factors, GROUP, C.KEYS)  # [BLOCK_N, GROUP] f32
                tl.store(
                    scores_out + tile * BLOCK_N + offs_n[:, None] + offset_of(member[None, :], BLOCK, GROUP), scores
                )
            counts, thresholds = take_block(
                candidates, scores_out, block_key - start, end - start, counts, thresholds, CAPACITY, C
            )
        tl.debug_barrier()
        for g in tl.range(0, GROUP):
            if first_token + g < num_tokens:
                count = tl.sum(tl.where(member == g, counts, 0))
                space = candidates + offset_of(g, CAPACITY, GROUP)
                if count > K:
                    keep_largest(space, count, C)
                    count = tl.full([], K, tl.int32)
                write_indices(space, count, indices_ptr + offset_of(first_token + g, K), K, C.BLOCK_K)
        tl.debug_barrier()  # the next tokens overwrite the candidates


@triton.jit
def merge_segments_kernel(
    candidates_ptr,  # [T, SEGMENTS, CAPACITY] pairs
    counts_ptr,  # [T, SEGMENTS] i32
    indices_ptr,  # [T, K] i32
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    counts_row = counts_ptr + offset_of(row, SEGMENTS)
    out = indices_ptr + offset_of(row, K)
    total = tl.sum(tl.load(counts_row + tl.arange(0, SEGMENTS)))
    if total >= K:
        candidates = as_packed(candidates_ptr) + offset_of(row, SEGMENTS * CAPACITY)
        choose_candidates(candidates, counts_row, total, out, K, SEGMENTS, CAPACITY, LANES, WARPS)
    else:  # the row has fewer than K keys, and they are 0, 1, …
        for base in tl.range(0, K, BLOCK_K):
            column = base + tl.arange(0, BLOCK_K)
            tl.store(out + column, tl.where(column < total, column, -1), mask=column < K)
