"""Attention in Triton, over entries of every format and on every architecture.

    unpack_entries_kernel    before a prefill that names entries often (unpack.py): entries that slots name → rows
    sparse_mla_kernel        a program takes BLOCK_H heads of a token and a split of its keys (`attend`):
                               tile t dequantised → S = Q·Kᵀ → softmax, sums so far rescaled → P·V
                             tiles of a second source follow, in the same loop if its entries are alike
    ── if a row has several splits: all of them have ended, or are waited for ──
    combine_splits_kernel    a program takes a head of a token, or a part of its dims: Σ 2**(lse − maximum) · out over
                             its splits

Whichever ends a row divides by the denominator, adds the sink, and rotates back (`finish`, `rotate_back`).
"""

import triton
import triton.language as tl

from xmla.core.lang.entries import LANES, TAIL_LANES, entry_offsets, load_entries, store_entries
from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.numbers import LOG2E, as_bytes, hidden
from xmla.core.lang.offsets import offset_of


@triton.jit
def as_source(cache_ptr, LAYOUT: tl.constexpr):
    """One pointer type for both caches, whose bytes may have different dtypes."""
    if LAYOUT.packed:
        return as_bytes(cache_ptr)
    else:
        return cache_ptr


@triton.jit
def attend(
    q, q_tail, maximum, denominator, accumulator, cache_ptr, slots_ptr, first, end, num_slots, extra_cache_ptr,
    extra_slots_ptr, extra_first, extra_end, num_extra_slots, PAGES: tl.constexpr, EXTRA: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Add keys to the running sums of a tile of heads, Σ 2**(s − maximum) v and Σ 2**(s − maximum).

    The keys are first … end − 1 of the cache with PAGES and, unless EXTRA is None, also of a second cache with the same
    layout, in one pipelined loop.
    """
    LAYOUT: tl.constexpr = PAGES.LAYOUT
    BLOCK_N: tl.constexpr = C.BLOCK_N
    tiles = tl.cdiv(tl.maximum(end, first) - first, BLOCK_N)  # a length may be the least integer
    all_tiles = tiles
    if EXTRA is not None:
        all_tiles += tl.cdiv(tl.maximum(extra_end, extra_first) - extra_first, BLOCK_N)
    for tile in tl.range(0, all_tiles, disable_licm=not C.HOIST):
        offs_n = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if EXTRA is not None:
            is_extra = tile >= tiles
            offs_n = tl.where(is_extra, offs_n - first - tiles * BLOCK_N + extra_first, offs_n)
            slots_at = tl.where(is_extra, extra_slots_ptr, slots_ptr)
            cache_at = tl.where(is_extra, as_source(extra_cache_ptr, LAYOUT), as_source(cache_ptr, LAYOUT))
            slot = tl.load(slots_at + offs_n, mask=offs_n < tl.where(is_extra, extra_end, end), other=-1)
            ok = (slot >= 0) & (slot < tl.where(is_extra, num_extra_slots, num_slots))  # [BLOCK_N]
            data, scales = entry_offsets(slot, LAYOUT, PAGES.PAGE_STRIDE, PAGES.PAGE_SIZE)
            extra_data, extra_scales = entry_offsets(slot, LAYOUT, EXTRA.PAGE_STRIDE, EXTRA.PAGE_SIZE)
            data, scales = tl.where(is_extra, extra_data, data), tl.where(is_extra, extra_scales, scales)
        else:
            slot = tl.load(slots_ptr + offs_n, mask=offs_n < end, other=-1)
            ok = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
            cache_at = as_source(cache_ptr, LAYOUT)
            data, scales = entry_offsets(slot, LAYOUT, PAGES.PAGE_STRIDE, PAGES.PAGE_SIZE)
        value, tail = load_entries(cache_at, data, scales, ok, q.dtype, LAYOUT)
        if LAYOUT.packed:
            value, tail = hidden(value, C.HIDE_BYTES), hidden(tail, C.HIDE_BYTES)
        scores = tl.dot(q, tl.trans(value))  # [BLOCK_H, BLOCK_N] f32
        if LAYOUT.tail:
            scores = tl.dot(q_tail, tl.trans(tail), scores)
        scores = tl.where(ok[None, :], scores * (C.SCALE * LOG2E), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # Without a valid key so far the maximum is −inf; −inf − −inf would be NaN.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probabilities = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(maximum - base)
        denominator = denominator * rescale + tl.sum(probabilities, 1)
        accumulator = tl.dot(probabilities.to(value.dtype), value, accumulator * rescale[:, None])
        maximum = new_maximum
    return maximum, denominator, accumulator


@triton.jit
def finish(denominator, maximum, sink_log2, EPILOGUE: tl.constexpr):
    """Factor of the output rows, and lse, of unnormalised sums Σ 2**(s − maximum) v, Σ 2**(s − maximum), per head.

    The sink adds to the denominator only; a head without keys has the factor 0 whatever its sink.
    """
    has_keys = denominator != 0.0  # true of NaN, which a key that is NaN rightly gives
    base = tl.where(has_keys, maximum, 0.0)
    factor = tl.where(has_keys, 1.0 / (denominator + tl.exp2(sink_log2 - base)), 0.0)
    lse = tl.where(has_keys, base + tl.log2(denominator), float("-inf"))
    if EPILOGUE.LSE_SINK:
        base = tl.maximum(lse, sink_log2)
        base = tl.where(tl.abs(base) == float("inf"), 0.0, base)
        lse = base + tl.log2(tl.exp2(lse - base) + tl.exp2(sink_log2 - base))
    return factor, tl.where(lse == float("-inf"), EPILOGUE.EMPTY_LSE, lse * EPILOGUE.LSE_UNIT)


@triton.jit
def load_sink(sink_ptr, offs_h, head_ok, HAS_SINK: tl.constexpr):
    """Sinks of heads `offs_h`, in log2; −inf without."""
    sink_log2 = tl.full(offs_h.shape, float("-inf"), tl.float32)
    if HAS_SINK:
        sink_log2 = tl.load(sink_ptr + offs_h, mask=head_ok, other=0.0) * LOG2E
    return sink_log2


@triton.jit
def rotate_back(out, cos_sin_ptr, positions_ptr, token, num_positions, EPILOGUE: tl.constexpr):
    """The inverse rope of the token's position, on the last ROPE lanes of out [BLOCK_H, lanes], pairs of neighbours."""
    ROPE: tl.constexpr = EPILOGUE.ROPE
    GROUP: tl.constexpr = out.shape[1] // ROPE
    position = tl.load(positions_ptr + token)
    known = (position >= 0) & (position < num_positions)
    offs = tl.arange(0, ROPE // 2)  # of the pair
    row = cos_sin_ptr + offset_of(position, EPILOGUE.COS_SIN_STRIDE) + offs
    mask = offs < tl.where(known, ROPE // 2, 0)
    cos = tl.load(row, mask=mask, other=1.0).to(tl.float32)[None, None, :]
    sin = tl.load(row + ROPE // 2, mask=mask, other=0.0).to(tl.float32)[None, None, :]
    even, odd = tl.split(tl.reshape(out, (out.shape[0], GROUP, ROPE // 2, 2)))
    is_rope = tl.arange(0, GROUP)[None, :, None] == GROUP - 1
    turned_even = tl.where(is_rope, even * cos + odd * sin, even)
    turned_odd = tl.where(is_rope, odd * cos - even * sin, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), out.shape)


@triton.jit
def sparse_mla_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if SOURCE.HAS_LENGTHS
    sink_ptr,  # [H] f32 if EPILOGUE.HAS_SINK
    extra_cache_ptr,  # [EXTRA_P, EXTRA_R, EXTRA_ROW] if EXTRA
    extra_slots_ptr,  # [T, EXTRA_K] i32 if EXTRA
    extra_lengths_ptr,  # [T] i32 if EXTRA.HAS_LENGTHS
    cos_sin_ptr,  # [S, E] if EPILOGUE.ROPE
    positions_ptr,  # [T] i32 if EPILOGUE.ROPE
    num_slots,
    num_keys,  # K
    slot_stride,
    num_extra_slots,
    num_extra_keys,  # EXTRA_K
    extra_slot_stride,
    num_positions,  # S
    num_splits,
    split_keys,  # of K rounded up to whole tiles, then EXTRA_K
    out_ptr,  # [T, H, LANES]; if SPLIT [T, num_splits, H, LANES] f32, normalised
    lse_ptr,  # [T, H] f32; if SPLIT [T, num_splits, H] f32, in log2
    C: tl.constexpr,  # PortableAttention
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    HEADS: tl.constexpr = C.HEADS
    BLOCK_H: tl.constexpr = C.BLOCK_H
    # Head blocks of one split are neighbours: they read the same entries.
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    split = pid // HEAD_BLOCKS % num_splits
    token = (pid // HEAD_BLOCKS // num_splits).to(tl.int64)

    offs_h = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = offs_h < HEADS
    offs_l = tl.arange(0, LANES)
    q_row = q_ptr + offset_of(token, C.Q_STRIDE_T) + offset_of(offs_h[:, None], C.Q_STRIDE_H, HEADS)
    q = tl.load(q_row + offs_l[None, :], mask=head_ok[:, None], other=0.0)  # [BLOCK_H, LANES]
    q_tail = tl.zeros([BLOCK_H, TAIL_LANES], q.dtype)
    if C.LAYOUT.tail:
        q_tail = tl.load(q_row + LANES + tl.arange(0, TAIL_LANES)[None, :], mask=head_ok[:, None], other=0.0)

    first = split * split_keys
    end = num_keys
    if C.SOURCE.HAS_LENGTHS:
        end = tl.minimum(tl.load(lengths_ptr + token), num_keys)
    end = tl.minimum(end, first + split_keys)
    extra_first = first - tl.cdiv(num_keys, C.BLOCK_N) * C.BLOCK_N
    extra_end = num_extra_keys
    if C.EXTRA is not None:
        if C.EXTRA.HAS_LENGTHS:
            extra_end = tl.minimum(tl.load(extra_lengths_ptr + token), num_extra_keys)
    extra_end = tl.minimum(extra_end, extra_first + split_keys)
    extra_first = tl.maximum(extra_first, 0)

    slots = slots_ptr + offset_of(token, slot_stride)
    extra_slots = extra_slots_ptr + offset_of(token, extra_slot_stride)
    maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    accumulator = tl.zeros([BLOCK_H, LANES], tl.float32)
    maximum, denominator, accumulator = attend(
        q, q_tail, maximum, denominator, accumulator, cache_ptr, slots, first, end, num_slots, extra_cache_ptr,
        extra_slots, extra_first, extra_end, num_extra_slots, C.SOURCE, C.JOINED, C,
    )  # fmt: skip
    if C.EXTRA is not None and C.JOINED is None:
        maximum, denominator, accumulator = attend(
            q, q_tail, maximum, denominator, accumulator, extra_cache_ptr, extra_slots, extra_first, extra_end,
            num_extra_slots, cache_ptr, slots, first, end, num_slots, C.EXTRA, None, C,
        )  # fmt: skip

    if C.SPLIT:
        factor = tl.where(denominator != 0.0, 1.0 / denominator, 0.0)
        lse = tl.where(denominator != 0.0, maximum + tl.log2(denominator), float("-inf"))
        row = offset_of(offset_of(token, num_splits) + split, HEADS) + offs_h
    else:
        sink_log2 = load_sink(sink_ptr, offs_h, head_ok, C.EPILOGUE.HAS_SINK)
        factor, lse = finish(denominator, maximum, sink_log2, C.EPILOGUE)
        row = offset_of(token, HEADS) + offs_h
    out = accumulator * factor[:, None]
    if C.EPILOGUE.ROPE and not C.SPLIT:
        out = rotate_back(out, cos_sin_ptr, positions_ptr, token, num_positions, C.EPILOGUE)
    out = tl.where(factor[:, None] != 0.0, out, 0.0)  # an empty row stays 0, whatever turned it
    out_ptrs = out_ptr + offset_of(row[:, None], LANES) + offs_l[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=head_ok[:, None])
    tl.store(lse_ptr + row, lse, mask=head_ok)


@triton.jit
def combine_splits_kernel(
    split_out_ptr,  # [T, num_splits, H, LANES], normalised: f32, or f16 over a power of two for each of POWERS groups
    split_lse_ptr,  # [T, num_splits, 1 + POWERS, H] f32: the lse in log2, then the powers
    sink_ptr,  # [H] f32 if EPILOGUE.HAS_SINK
    cos_sin_ptr,  # [S, E] if EPILOGUE.ROPE
    positions_ptr,  # [T] i32 if EPILOGUE.ROPE
    num_splits,
    num_positions,  # S
    out_ptr,  # [T, H, LANES]
    lse_ptr,  # [T, H] f32
    C: tl.constexpr,  # Combination
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    HEADS: tl.constexpr = C.HEADS
    PARTS: tl.constexpr = C.PARTS
    POWERS: tl.constexpr = C.POWERS
    MAX_SPLITS: tl.constexpr = C.MAX_SPLITS
    GROUPS: tl.constexpr = max(POWERS // PARTS, 1)  # of the program's dims
    DIMS: tl.constexpr = LANES // PARTS // GROUPS
    LSE_STRIDE: tl.constexpr = (1 + POWERS) * HEADS
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    first_row = offset_of(row // HEADS, num_splits)
    offs_h = tl.program_id(0) // PARTS % HEADS + tl.arange(0, 1)  # one head
    lse_ptrs = split_lse_ptr + offset_of(first_row, LSE_STRIDE) + offs_h
    result_ptrs = split_out_ptr + offset_of(offset_of(first_row, HEADS) + offs_h, LANES)
    group = part * GROUPS + tl.arange(0, GROUPS)[None, :]
    offs_l = offset_of(group[:, :, None], DIMS, PARTS * GROUPS) + tl.arange(0, DIMS)[None, None, :]
    maximum = tl.full([1], float("-inf"), tl.float32)
    denominator = tl.zeros([1], tl.float32)
    accumulator = tl.zeros([GROUPS, DIMS], tl.float32)
    # As many results as registers hold are loaded at once, and first: the compiler issues loads in this order.
    AT_ONCE: tl.constexpr = min(C.AT_ONCE, 32 * PARTS)
    end = MAX_SPLITS
    if AT_ONCE < MAX_SPLITS and C.SKIP:  # most rows have no more splits than are loaded at once
        every = tl.arange(0, MAX_SPLITS)
        every_lse_ptrs = lse_ptrs + offset_of(every, LSE_STRIDE, MAX_SPLITS)
        every_lse = tl.load(every_lse_ptrs, mask=every < num_splits, other=float("-inf"))
        end = tl.max(tl.where(every_lse != float("-inf"), every + 1, 1), 0)
    for first in tl.range(0, end, AT_ONCE, num_stages=1):
        split = first + tl.arange(0, AT_ONCE)[:, None]
        mask = split < num_splits
        split_lse_ptrs = lse_ptrs + offset_of(split, LSE_STRIDE, MAX_SPLITS)
        lse = tl.load(split_lse_ptrs, mask=mask, other=float("-inf"))  # [AT_ONCE, 1]
        if C.SKIP:
            mask = lse != float("-inf")
        ptrs = result_ptrs + offset_of(split[:, :, None], HEADS * LANES, MAX_SPLITS) + offs_l
        result = tl.load(ptrs, mask=mask[:, :, None], other=0.0).to(tl.float32)  # [AT_ONCE, GROUPS, DIMS]
        new_maximum = tl.maximum(maximum, tl.max(lse, 0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        rescale = tl.exp2(maximum - base)
        weight = tl.exp2(lse - base[None, :])
        denominator = denominator * rescale + tl.sum(weight, 0)
        if POWERS:
            powers = split_lse_ptrs + offset_of(1 + group * POWERS // (PARTS * GROUPS), HEADS, 1 + POWERS)
            weight *= tl.load(powers, mask=mask, other=0.0)
        accumulator = accumulator * rescale[:, None] + tl.sum(result * weight[:, :, None], 0)
        maximum = new_maximum

    sink_log2 = load_sink(sink_ptr, offs_h, offs_h < HEADS, C.EPILOGUE.HAS_SINK)
    factor, lse = finish(denominator, maximum, sink_log2, C.EPILOGUE)
    out = tl.reshape(accumulator, (1, GROUPS * DIMS)) * factor[:, None]
    if C.EPILOGUE.ROPE:  # the last part has the roped dims: to the others no position is known
        known = tl.where(part == PARTS - 1, num_positions, 0)
        out = rotate_back(out, cos_sin_ptr, positions_ptr, row // HEADS, known, C.EPILOGUE)
    out = tl.where(factor[:, None] != 0.0, out, 0.0)  # an empty row stays 0, whatever turned it
    out_ptrs = out_ptr + offset_of(row, LANES) + part * (GROUPS * DIMS) + tl.arange(0, GROUPS * DIMS)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row + tl.arange(0, 1), lse, mask=offs_h < tl.where(part == 0, HEADS, 0))


@triton.jit
def unpack_entries(cache_ptr, slot, ok, rows_ptr, C: tl.constexpr):
    """Entries at `slot` where `ok`, as rows."""
    ROWS: tl.constexpr = C.ROWS
    data, scales = entry_offsets(slot, C.LAYOUT, C.PAGE_STRIDE, C.PAGE_SIZE)
    value, tail = load_entries(cache_ptr, data, scales, ok, tl.float32, C.LAYOUT)
    store_entries(rows_ptr, slot, ok, value, tail, ROWS, C.PAGE_SIZE * ROWS.dims, C.PAGE_SIZE, 0)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def unpack_entries_kernel(
    marks_ptr,  # [num_parts, num_words] i32: a bit for each entry that one of the slots names
    cache_ptr,  # [P, R, ROW]
    num_parts,
    num_words,
    rows_ptr,  # [P, R, L+E] bf16 | f16, where a slot names the entry
    C: tl.constexpr,  # Unpacked
):
    BLOCK: tl.constexpr = C.BLOCK
    ENTRIES: tl.constexpr = C.ENTRIES
    PARTS: tl.constexpr = C.PARTS
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    first = offset_of(tl.program_id(0), ENTRIES)
    part = tl.arange(0, PARTS)
    words = tl.load(marks_ptr + offset_of(part, num_words) + first // 32, mask=part < num_parts, other=0)
    marks = tl.reduce(words, 0, either)
    for at in tl.static_range(0, ENTRIES, BLOCK):
        entry = first + at + tl.arange(0, BLOCK)
        unpack_entries(cache_ptr, entry, ((marks >> (entry % 32).to(tl.int32)) & 1) != 0, rows_ptr, C)
