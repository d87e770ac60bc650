"""The positions of selected columns; and kernels that score every key of a token's range once.

These store the logits of the keys of a token's blocks by their columns. A place is a block's in the list of a token's
blocks. A token that lists a block twice has the logits at one of its places; they are copied to the others.
"""

import triton
import triton.language as tl

from xmla.core.lang.blocks import blocks_of, entries_of_columns
from xmla.core.lang.indexer import head_scores, heads_of_tile, load_keys, load_query
from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.numbers import as_bytes
from xmla.core.lang.offsets import multiple, offset_of
from xmla.core.ops.selection.select_topk.kernels import row_range


@triton.jit
def block_indices_kernel(
    blocks_ptr,  # [T, BLOCKS] i32
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    first_row,
    num_keys,  # of a request, or of all
    k,
    blocks_stride,
    num_columns,  # BLOCKS · GRANULARITY
    indices_ptr,  # [T, K] i32, columns of the blocks' logits that become positions
    HAS_STARTS: tl.constexpr,
    UNIT: tl.constexpr,  # of k
    GRANULARITY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP_LIMIT: tl.constexpr,
):
    let_next_start(OVERLAP_LIMIT)
    wait_for_earlier(OVERLAP_LIMIT)
    row = first_row + tl.program_id(0).to(tl.int64)
    _, length = row_range(starts_ptr, ends_ptr, row, num_keys, HAS_STARTS)
    blocks_row = blocks_ptr + offset_of(row, blocks_stride)
    k = multiple(k, UNIT)
    out = indices_ptr + offset_of(row, k)
    count = 0
    for first in tl.range(0, k, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        column = tl.load(out + offs_k, mask=offs_k < k, other=-1)
        position, ok = entries_of_columns(blocks_row, column, num_columns, length, GRANULARITY)
        place = count + tl.cumsum(ok.to(tl.int32), 0) - 1
        tl.debug_barrier()  # columns are read before they are overwritten
        tl.store(out + place, position, mask=ok)
        count += tl.sum(ok.to(tl.int32))
    tl.debug_barrier()
    for first in tl.range(0, k, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        tl.store(out + offs_k, -1, mask=(offs_k >= count) & (offs_k < k))


@triton.jit
def load_blocks(blocks_row, place, num_columns, length, GRANULARITY: tl.constexpr):
    """Blocks of a token at `place` [N], and how many of a block's keys are below `length`; 0 of what is no block."""
    block = tl.load(blocks_row + place, mask=place < num_columns // GRANULARITY, other=-1)
    known = (block >= 0) & (block < blocks_of(length, GRANULARITY))
    entries = tl.minimum(length - tl.where(known, block, 0) * GRANULARITY, GRANULARITY)
    return block, tl.where(known, entries, 0)


@triton.jit
def columns_of_place(blocks_row, places_row, column, num_columns, length, GRANULARITY: tl.constexpr):
    """Which of `column` [N] have a key, and the column that has its logit: another one of blocks listed twice."""
    position, ok = entries_of_columns(blocks_row, column, num_columns, length, GRANULARITY)
    place = tl.load(places_row + position // GRANULARITY, mask=ok, other=0)
    return ok, place * GRANULARITY + column % GRANULARITY


@triton.jit
def block_places_kernel(
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    blocks_ptr,  # [T, BLOCKS] i32
    first_row,  # of those of blocks
    num_keys,
    num_blocks,  # of a range of num_keys
    blocks_stride,
    num_columns,  # BLOCKS · GRANULARITY
    logits_ptr,  # [rows, num_columns] f32: −inf where a column below the width has no key
    widths_ptr,  # [T] i32
    places_ptr,  # [rows, num_blocks] i32, −1 of blocks that are not listed
    repeats_ptr,  # [rows] i32, whether a block is listed twice
    GRANULARITY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP_LIMIT: tl.constexpr,
):
    let_next_start(OVERLAP_LIMIT)
    wait_for_earlier(OVERLAP_LIMIT)
    row = tl.program_id(0).to(tl.int64)
    token = first_row + row
    _, length = row_range(starts_ptr, ends_ptr, token, num_keys, True)
    blocks_row = blocks_ptr + offset_of(token, blocks_stride)
    places_row = places_ptr + offset_of(row, num_blocks)
    count = blocks_of(length, GRANULARITY)
    for first in tl.range(0, count, BLOCK_N):
        block = first + tl.arange(0, BLOCK_N)
        tl.store(places_row + block, -1, mask=block < count)
    tl.debug_barrier()
    ends = tl.zeros([BLOCK_N], tl.int32)
    for first in tl.range(0, num_columns // GRANULARITY, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        block, entries = load_blocks(blocks_row, place, num_columns, length, GRANULARITY)
        tl.store(places_row + block, place, mask=entries > 0)
        ends = tl.maximum(ends, tl.where(entries > 0, place * GRANULARITY + entries, 0))
    width = tl.max(ends)
    tl.store(widths_ptr + token, width)
    tl.debug_barrier()  # any one place of a block stays

    repeated = tl.zeros([BLOCK_N], tl.int32)
    missing = tl.zeros([BLOCK_N], tl.int32)  # below the width
    for first in tl.range(0, tl.cdiv(width, GRANULARITY), BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        block, entries = load_blocks(blocks_row, place, num_columns, length, GRANULARITY)
        kept = tl.load(places_row + block, mask=entries > 0, other=0)
        repeated |= ((entries > 0) & (kept != place)).to(tl.int32)
        missing |= (entries < tl.minimum(width - place * GRANULARITY, GRANULARITY)).to(tl.int32)
    tl.store(repeats_ptr + row, tl.max(repeated))
    if tl.max(missing) > 0:
        out = logits_ptr + offset_of(row, num_columns)
        for first in tl.range(0, width, BLOCK_N):
            column = first + tl.arange(0, BLOCK_N)
            ok = entries_of_columns(blocks_row, column, width, length, GRANULARITY)[1]
            tl.store(out + column, float("-inf"), mask=(column < width) & (ok == 0))


@triton.jit
def repeat_logits_kernel(
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    blocks_ptr,  # [T, BLOCKS] i32
    widths_ptr,  # [T] i32
    places_ptr,  # [rows, num_blocks] i32
    repeats_ptr,  # [rows] i32
    first_row,  # of those of blocks
    num_keys,
    num_blocks,  # of a range of num_keys
    blocks_stride,
    num_columns,  # BLOCKS · GRANULARITY
    logits_ptr,  # [rows, num_columns] f32, of blocks listed twice copied from one place to the others
    GRANULARITY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP_LIMIT: tl.constexpr,
):
    let_next_start(OVERLAP_LIMIT)
    wait_for_earlier(OVERLAP_LIMIT)
    row = tl.program_id(0).to(tl.int64)
    token = first_row + row
    if tl.load(repeats_ptr + row) > 0:
        _, length = row_range(starts_ptr, ends_ptr, token, num_keys, True)
        width = tl.load(widths_ptr + token)
        blocks_row = blocks_ptr + offset_of(token, blocks_stride)
        places_row = places_ptr + offset_of(row, num_blocks)
        logits_row = logits_ptr + offset_of(row, num_columns)
        for first in tl.range(0, width, BLOCK_N):
            column = first + tl.arange(0, BLOCK_N)
            ok, source = columns_of_place(blocks_row, places_row, column, width, length, GRANULARITY)
            ok = ok & (source != column)
            tl.store(logits_row + column, tl.load(logits_row + source, mask=ok, other=0.0), mask=ok)


@triton.jit
def logits_at_places_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3 | [N, D/2] bytes
    key_scales_ptr,  # [N] f32 | i32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    places_ptr,  # [num_tokens, num_blocks] i32
    first_row,  # of num_tokens tokens
    num_tokens,
    num_keys,
    num_blocks,
    num_columns,
    logits_ptr,  # [num_tokens, num_columns] f32, of keys in blocks that have a place
    C: tl.constexpr,  # LogitsAtPlaces
):
    QUERY: tl.constexpr = C.QUERY
    HEADS: tl.constexpr = QUERY.HEADS
    D: tl.constexpr = QUERY.D
    BLOCK_I: tl.constexpr = QUERY.BLOCK_I
    BLOCK_T: tl.constexpr = C.BLOCK_T
    GROUP: tl.constexpr = C.GROUP
    BLOCK_N: tl.constexpr = C.BLOCK_N
    GRANULARITY: tl.constexpr = C.GRANULARITY
    q8_ptr += offset_of(first_row, QUERY.Q_STRIDE_T)
    weights_ptr += offset_of(first_row, QUERY.WEIGHT_STRIDE)
    starts_ptr += first_row
    ends_ptr += first_row
    # Neighbouring programs have the same queries and consecutive keys.
    key_blocks = tl.cdiv(num_keys, BLOCK_N)
    first_token = tl.program_id(0) // key_blocks * BLOCK_T
    first_key = tl.program_id(0) % key_blocks * BLOCK_N
    offs_n = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_t = first_token + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    start = tl.load(starts_ptr + offs_t, mask=offs_t < num_tokens, other=0x7FFFFFFF)
    end = tl.load(ends_ptr + offs_t, mask=offs_t < num_tokens, other=0)
    if (tl.min(start) < first_key + BLOCK_N) & (tl.max(end) > first_key):
        # Keys outside every row's range are not read.
        wanted = (offs_n < num_keys) & (offs_n >= tl.min(start)) & (offs_n < tl.max(end))
        key_row = offset_of(offs_n, C.KEY_STRIDE)
        scale_ptrs = as_bytes(key_scales_ptr) + offset_of(offs_n, 4)
        keys, factors = load_keys(keys_ptr, key_row, scale_ptrs, wanted, D, C.KEYS.FORMAT)
        offs_d = tl.arange(0, D)
        offs_g = tl.arange(0, GROUP)
        member, head = heads_of_tile(GROUP, BLOCK_I, C.KEYS.RUN)  # of each row of q
        for i in tl.range(0, BLOCK_T, GROUP):
            # Rows past the last token repeat it: cheaper than a mask, and they are not stored.
            row_token = tl.minimum(first_token + i + member, num_tokens - 1).to(tl.int64)
            q_row = offset_of(row_token, QUERY.Q_STRIDE_T) + offset_of(head, QUERY.Q_STRIDE_I, HEADS)
            q_ptrs = q8_ptr + q_row[:, None] + offs_d[None, :]
            weight_ptrs = weights_ptr + offset_of(row_token, QUERY.WEIGHT_STRIDE) + head
            if HEADS < BLOCK_I:
                q = load_query(q_ptrs, (head < HEADS)[:, None])
                weights = tl.load(weight_ptrs, mask=head < HEADS, other=0.0)
            else:
                q = load_query(q_ptrs, None)
                weights = tl.load(weight_ptrs)
            scores = head_scores(keys, q, weights, factors, GROUP, C.KEYS)  # [BLOCK_N, GROUP] f32
            token = first_token + i + offs_g
            row_start = tl.maximum(tl.load(starts_ptr + token, mask=token < num_tokens, other=0), 0)
            row_end = tl.load(ends_ptr + token, mask=token < num_tokens, other=0)  # 0: no key
            in_range = wanted[:, None] & (offs_n[:, None] >= row_start[None, :]) & (offs_n[:, None] < row_end[None, :])
            position = tl.where(in_range, offs_n[:, None] - row_start[None, :], 0)  # of the token's range
            place_ptrs = places_ptr + offset_of(token, num_blocks)[None, :] + position // GRANULARITY
            place = tl.load(place_ptrs, mask=in_range, other=-1)
            column = place * GRANULARITY + position % GRANULARITY
            out = logits_ptr + offset_of(token, num_columns)[None, :] + column
            tl.store(out, scores, mask=place >= 0)
