"""Indexer logits and top-k in one pass, in memory that does not depend on the number of keys.

A program scores its tokens' keys tile by tile and appends what can still be among the k largest to its candidates:
every key at first, later only keys above the k-th largest so far. When the space of CAPACITY candidates runs out, those
that are no longer among the k largest go (`keep_largest`). Candidates stand by ascending key throughout, so that a key
that ties with the k-th largest but comes later is out, as the total order wants. On unordered keys k · (1 + ln(N / k))
keys are appended in all; on keys in ascending order all of them are, which costs time but stays right.
"""

import triton
import triton.language as tl

from xmla.core.lang import as_bytes, head_scores, load_keys
from xmla.core.ops.select_topk.kernels import choose_candidates, kth_largest, order_key


@triton.jit
def append(candidates, columns, place, counts, thresholds, scores, column, ok):
    """Store scores [BLOCK_N, GROUP] above thresholds [GROUP] behind each token's counts [GROUP]; the new counts."""
    keep = ok & (order_key(scores) > thresholds[None, :])
    at = place[None, :] + counts[None, :] + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(candidates + at, scores, mask=keep)
    tl.store(columns + at, column, mask=keep)
    return counts + tl.sum(keep.to(tl.int32), 0)


@triton.jit
def keep_largest(candidates, columns, count, K: tl.constexpr, CAPACITY: tl.constexpr):
    """Reduce `count` > K candidates to the K largest, in place and in order; the order key of the least of them."""
    lane = tl.arange(0, CAPACITY)
    in_use = lane < count
    value = tl.load(candidates + lane, mask=in_use, other=0.0)
    column = tl.load(columns + lane, mask=in_use, other=0)
    keys = tl.where(in_use, order_key(value), 0)
    threshold = kth_largest(keys, K, 32)
    ties = K - tl.sum((keys > threshold).to(tl.int32))
    equal = keys == threshold
    chosen = (keys > threshold) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= ties))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all is read before it is overwritten
    tl.store(candidates + place, value, mask=chosen)
    tl.store(columns + place, column, mask=chosen)
    tl.debug_barrier()
    return threshold


@triton.jit
def make_room(candidates, columns, place, counts, thresholds, K: tl.constexpr, GROUP: tl.constexpr,
              CAPACITY: tl.constexpr):  # fmt: skip
    """`keep_largest` for every token of the group with more than K candidates; their counts and thresholds [GROUP]."""
    tl.debug_barrier()
    member = tl.arange(0, GROUP)
    for g in tl.static_range(GROUP):
        count = tl.sum(tl.where(member == g, counts, 0))
        at = tl.sum(tl.where(member == g, place, 0))
        if count > K:
            threshold = keep_largest(candidates + at, columns + at, count, K, CAPACITY)
            thresholds = tl.where(member == g, threshold, thresholds)
            counts = tl.where(member == g, K, counts)
    return counts, thresholds


@triton.jit
def write_indices(columns, count, out, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The columns of `count` ≤ K candidates, then −1."""
    for first in tl.range(0, K, BLOCK_K):
        lane = first + tl.arange(0, BLOCK_K)
        column = tl.load(columns + lane, mask=lane < count, other=-1)
        tl.store(out + lane, column, mask=lane < K)


@triton.jit(do_not_specialize=["num_tokens", "num_keys", "num_groups"])
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
    candidates_ptr,  # [programs, GROUP, CAPACITY] f32
    columns_ptr,  # [programs, GROUP, CAPACITY] i32, relative to the token's start
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_I: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    MXFP4: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_d = tl.arange(0, D)
    member = tl.arange(0, GROUP)
    row_member = tl.arange(0, GROUP * BLOCK_I) // BLOCK_I  # of each row of q: its token within the group, its head
    row_head = tl.arange(0, GROUP * BLOCK_I) % BLOCK_I
    place = (tl.program_id(0) * GROUP + member) * CAPACITY  # [GROUP]
    for step in tl.range(0, tl.cdiv(num_groups - tl.program_id(0), tl.num_programs(0))):
        first_token = (tl.program_id(0) + step * tl.num_programs(0)) * GROUP
        row_token = (first_token + row_member).to(tl.int64)
        row_ok = (row_head < HEADS) & (row_token < num_tokens)
        q_row = row_token * Q_STRIDE_T + row_head * Q_STRIDE_I
        q = tl.load(q8_ptr + q_row[:, None] + offs_d[None, :], mask=row_ok[:, None], other=0.0)
        weights = tl.load(weights_ptr + row_token * WEIGHT_STRIDE + row_head, mask=row_ok, other=0.0)

        token = first_token + member
        token_ok = token < num_tokens
        start = tl.minimum(tl.maximum(tl.load(starts_ptr + token, mask=token_ok, other=num_keys), 0), num_keys)
        end = tl.maximum(tl.minimum(tl.load(ends_ptr + token, mask=token_ok, other=0), num_keys), start)
        first_key = tl.min(start)
        counts = tl.zeros([GROUP], tl.int32)
        thresholds = tl.zeros([GROUP], tl.uint32)
        for tile in tl.range(0, tl.cdiv(tl.max(end) - first_key, BLOCK_N)):
            key = first_key + tile * BLOCK_N + tl.arange(0, BLOCK_N)
            in_keys = key < tl.max(end)
            key_row = key.to(tl.int64) * KEY_STRIDE
            keys, factors = load_keys(keys_ptr, key_row, as_bytes(key_scales_ptr) + key * 4, in_keys, D, MXFP4)
            scores = head_scores(keys, q, weights, factors, GROUP)  # [BLOCK_N, GROUP] f32
            ok = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
            column = key[:, None] - start[None, :]
            counts = append(candidates_ptr, columns_ptr, place, counts, thresholds, scores, column, ok)
            if tl.max(counts) > CAPACITY - BLOCK_N:
                counts, thresholds = make_room(
                    candidates_ptr, columns_ptr, place, counts, thresholds, K, GROUP, CAPACITY
                )
        counts, thresholds = make_room(candidates_ptr, columns_ptr, place, counts, thresholds, K, GROUP, CAPACITY)
        for g in tl.static_range(GROUP):
            if first_token + g < num_tokens:
                at = tl.sum(tl.where(member == g, place, 0))
                out = indices_ptr + (first_token + g).to(tl.int64) * K
                write_indices(columns_ptr + at, tl.sum(tl.where(member == g, counts, 0)), out, K, BLOCK_K)
        tl.debug_barrier()  # the next tokens overwrite the candidates


@triton.jit
def merge_segments_kernel(
    candidates_ptr,  # [T, SEGMENTS, CAPACITY] f32
    columns_ptr,  # [T, SEGMENTS, CAPACITY] i32
    counts_ptr,  # [T, SEGMENTS] i32
    indices_ptr,  # [T, K] i32
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * SEGMENTS * CAPACITY
    counts_row = counts_ptr + row * SEGMENTS
    out = indices_ptr + row * K
    total = tl.sum(tl.load(counts_row + tl.arange(0, SEGMENTS)))
    if total >= K:
        choose_candidates(candidates_ptr + first, columns_ptr + first, counts_row, out, K, SEGMENTS, CAPACITY)
    else:  # the row has fewer than K keys, and they are 0, 1, …
        for base in tl.range(0, K, BLOCK_K):
            column = base + tl.arange(0, BLOCK_K)
            tl.store(out + column, tl.where(column < total, column, -1), mask=column < K)
