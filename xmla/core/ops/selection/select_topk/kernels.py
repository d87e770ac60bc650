"""Exact top-k of a row in two launches.

`topk_candidates_kernel` keeps the elements of a row that can be among its k largest, in one pass: those that reach a
threshold estimated from a sample, a few more than k. `topk_select_kernel` counts them. If there are at least k and no
more than fit, they contain the k largest: the kernel finds the exact threshold among them, by thirds, and writes the
winners by ascending column. A row with a misleading sample, or with too few numbers beside its NaN, is searched in
place instead, which is slower and equally exact. So the result depends only on the row, never on the sample.

Rows that do not fill the machine take as long as the longest chain of latencies and barriers. So they are split into
many segments, a search tries several thresholds at each step, and a segment fills its candidates up to whole pieces:
places are then found for pieces instead of candidates.

    topk_candidates_kernel: a program takes a segment of a row
      sample of the whole row → threshold ─┐ (every segment finds the same one)
      load tile 0 (EARLY: before it)       ├→ keep of tile i ─→ append to candidates[segment], counts[segment]
      load tile i + 1 ─────────────────────┘   while tile i + 1 is on its way
    ── all segments of all rows have ended (or, with OVERLAP_LIMIT, are waited for) ──
    topk_select_kernel: a program takes a row
      counts: k ≤ total, and all fit ── yes → candidates in registers → thirds → winners by column → indices
                                     └─ no  → passes over the row, by quarters of the k-th's interval → indices

Where no row can be longer than k, `topk_whole_kernel` writes all columns of each, and reads no logits.

Candidates are packed in pairs.py, tiles are loaded and appended in tile.py, thresholds searched in search.py, winners
written in choose.py.
"""

import triton
import triton.language as tl

from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.offsets import multiple, offset_of
from xmla.core.ops.selection.select_topk.choose import choose_candidates, choose_in_row, choose_pieces
from xmla.core.ops.selection.select_topk.pairs import ABSENT, KEY_OF_INF, KEY_OF_MINUS_INF, as_packed, order_key
from xmla.core.ops.selection.select_topk.sample import SLACK_PART
from xmla.core.ops.selection.select_topk.search import kth_largest, kth_largest_of_few
from xmla.core.ops.selection.select_topk.tile import COLUMNS_A_WARP, append_tile, load_tile, no_tile

CHUNK = tl.constexpr(32)  # adjacent elements of a sample


@triton.jit
def row_range(starts_ptr, ends_ptr, row, num_columns, HAS_STARTS: tl.constexpr):
    """A row's first column and its number of columns, both within the row."""
    start = 0
    if HAS_STARTS:
        start = tl.minimum(tl.maximum(tl.load(starts_ptr + row), 0), num_columns)
    # Clamped before the subtraction: −2**31 − start would wrap to a large length.
    end = tl.maximum(tl.minimum(tl.load(ends_ptr + row), num_columns), start)
    return start, end - start


@triton.jit
def estimate_threshold(row_ptr, length, sample_rank, C: tl.constexpr):
    """A value that a few more than sample_rank · STEP of the row's elements reach, if its sample is representative.

    It is the sample_rank-th largest of the maxima of LANES lanes, onto which one CHUNK of every STEP is folded. The
    chunk's place among the STEP rotates, so that data with a period is not sampled in one phase only.
    """
    LANES: tl.constexpr = C.LANES
    STEP: tl.constexpr = C.STEP
    lane = tl.arange(0, LANES)
    block = lane // CHUNK
    offs = (block * STEP + block * 5 % STEP) * CHUNK + lane % CHUNK
    maxima = tl.full([LANES], float("-inf"), tl.float32)  # NaN never becomes a maximum
    blocks = length // (CHUNK * STEP)
    AT_ONCE: tl.constexpr = max(2, C.WARPS * 1024 // LANES)  # 32 loads per thread
    for fold in tl.range(0, tl.cdiv(blocks, LANES // CHUNK), loop_unroll_factor=AT_ONCE, disable_licm=True):
        left = blocks - fold * (LANES // CHUNK)
        x = tl.load(row_ptr + fold * (LANES * STEP) + offs, mask=block < left, other=float("-inf"))
        maxima = tl.maximum(maxima, x.to(tl.float32))
    low, high = tl.full([], KEY_OF_MINUS_INF, tl.uint32), tl.full([], KEY_OF_INF + 1, tl.uint32)
    reached = tl.full([], LANES, tl.int32)
    slack = sample_rank // SLACK_PART
    if C.TRIALS == 2:
        key, _ = kth_largest(order_key(maxima), sample_rank, low, high, reached, 1, slack)
    else:
        key, _ = kth_largest_of_few(order_key(maxima), sample_rank, low, high, reached, 1, slack, C.TRIALS)
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def topk_candidates_kernel(
    logits_ptr,  # [T, N] f32 | bf16
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    first_row,  # of those of logits
    num_columns,
    row_stride,
    k,
    sample_rank,
    candidates_ptr,  # [T, SEGMENTS, CAPACITY] pairs, columns relative to the row's start and ascending
    counts_ptr,  # [T, SEGMENTS] i32, also of those that did not fit
    thresholds_ptr,  # [T] f32: every candidate reaches it
    C: tl.constexpr,  # Candidates
):
    SEGMENTS: tl.constexpr = C.SEGMENTS
    CAPACITY: tl.constexpr = C.CAPACITY
    PIECE: tl.constexpr = C.PIECE
    UNIT: tl.constexpr = C.UNIT
    WARPS: tl.constexpr = C.WARPS
    let_next_start(C.OVERLAP_LIMIT)
    row = (tl.program_id(0) // SEGMENTS).to(tl.int64)
    segment = tl.program_id(0) % SEGMENTS
    start, length = row_range(starts_ptr, ends_ptr, first_row + row, num_columns, C.HAS_STARTS)
    wait_for_earlier(C.OVERLAP_LIMIT)
    if length > k:
        row_ptr = logits_ptr + offset_of(row, multiple(row_stride, UNIT)) + start
        TILE: tl.constexpr = WARPS * COLUMNS_A_WARP
        tiles = tl.cdiv(tl.cdiv(length, TILE), SEGMENTS)
        first = segment * tiles * TILE
        whole = tl.maximum(tl.minimum(length - first, tiles * TILE), 0) // TILE
        ahead = no_tile(WARPS)
        if C.EARLY:
            if whole > 0:
                ahead = load_tile(row_ptr + first, TILE, True, WARPS, UNIT)
        threshold = tl.full([], float("-inf"), tl.float32)
        if length > CAPACITY:
            threshold = estimate_threshold(row_ptr, length, sample_rank, C)
        if segment == 0:
            tl.store(thresholds_ptr + row, threshold)

        out = as_packed(candidates_ptr) + offset_of(offset_of(row, SEGMENTS) + segment, CAPACITY)
        count = tl.zeros([], tl.int32)
        if whole > 0:
            if not C.EARLY:
                ahead = load_tile(row_ptr + first, TILE, True, WARPS, UNIT)
            # A tile is loaded while the one before it is examined; after the last tile it is loaded once more.
            for tile in tl.range(0, whole):
                now = ahead
                after = first + tl.minimum(tile + 1, whole - 1) * TILE
                ahead = load_tile(row_ptr + after, TILE, True, WARPS, UNIT)
                at = first + tile * TILE
                count = append_tile(out, count, CAPACITY, now, at, 0, TILE, 0, threshold, True, False, WARPS)
        if whole < tiles:
            at = first + whole * TILE
            rest = load_tile(row_ptr + at, length - at, False, WARPS, UNIT)
            count = append_tile(out, count, CAPACITY, rest, at, 0, TILE, 0, threshold, False, False, WARPS)
        tl.store(counts_ptr + offset_of(row, SEGMENTS) + segment, count)
        if PIECE:
            if count <= CAPACITY:
                lane = tl.arange(0, PIECE)
                absent = tl.full([PIECE], ABSENT, tl.uint64)
                tl.store(out + count + lane, absent, mask=lane < tl.cdiv(count, PIECE) * PIECE - count)


@triton.jit
def write_whole(out, length, width, TILE: tl.constexpr):
    """Write the selection of a row of at most k columns, of which none is read: all of them."""
    for base in tl.range(0, width, TILE):
        column = base + tl.arange(0, TILE)
        tl.store(out + column, tl.where(column < length, column, -1), mask=column < width)


@triton.jit
def select_row(
    logits_ptr, starts_ptr, ends_ptr, candidates_ptr, counts_ptr, thresholds_ptr, first_row, num_columns, row_stride, k,
    indices_ptr, C: tl.constexpr,
):  # fmt: skip
    """Write the selection of this program's row; parameters as in `topk_select_kernel`."""
    SEGMENTS: tl.constexpr = C.SEGMENTS
    CAPACITY: tl.constexpr = C.CAPACITY
    PIECE: tl.constexpr = C.PIECE
    TILE: tl.constexpr = C.TILE
    row = tl.program_id(0).to(tl.int64)
    start, length = row_range(starts_ptr, ends_ptr, first_row + row, num_columns, C.HAS_STARTS)
    if C.K:
        k = C.K
    width = multiple(k, C.UNIT)
    out = indices_ptr + offset_of(first_row + row, width)
    if length <= k:
        write_whole(out, length, width, TILE)
    else:
        row_ptr = logits_ptr + offset_of(row, row_stride) + start
        if SEGMENTS == 0:
            choose_in_row(row_ptr, length, tl.full([], float("-inf"), tl.float32), out, k, TILE)
        elif PIECE:
            counts = tl.load(counts_ptr + offset_of(row, SEGMENTS) + tl.arange(0, SEGMENTS))
            threshold = tl.load(thresholds_ptr + row)
            total = tl.sum(counts)
            ends = tl.cumsum(tl.cdiv(counts, PIECE))
            if (tl.max(ends) > CAPACITY // PIECE) | (total < k):
                choose_in_row(row_ptr, length, tl.load(thresholds_ptr + row), out, k, TILE)
            else:
                candidates = as_packed(candidates_ptr) + offset_of(row, SEGMENTS * CAPACITY)
                choose_pieces(candidates, ends, threshold, total, out, k, SEGMENTS, CAPACITY, PIECE, C.TRIALS)
        else:
            counts_row = counts_ptr + offset_of(row, SEGMENTS)
            total = tl.sum(tl.load(counts_row + tl.arange(0, SEGMENTS)))
            if (total > CAPACITY) | (total < k):
                choose_in_row(row_ptr, length, tl.load(thresholds_ptr + row), out, k, TILE)
            else:
                candidates = as_packed(candidates_ptr) + offset_of(row, SEGMENTS * CAPACITY)
                choose_candidates(candidates, counts_row, total, out, k, SEGMENTS, CAPACITY, CAPACITY, C.WARPS)


@triton.jit
def topk_select_kernel(
    logits_ptr,  # [T, N] f32 | bf16
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    candidates_ptr,  # [T, SEGMENTS, CAPACITY] pairs
    counts_ptr,  # [T, SEGMENTS] i32
    thresholds_ptr,  # [T] f32 if SEGMENTS
    first_row,  # of those of logits
    num_columns,
    row_stride,
    k,
    indices_ptr,  # [T, K] i32
    C: tl.constexpr,  # Selection
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    select_row(
        logits_ptr, starts_ptr, ends_ptr, candidates_ptr, counts_ptr, thresholds_ptr, first_row, num_columns,
        row_stride, k, indices_ptr, C,
    )  # fmt: skip


@triton.jit
def select_whole_row(starts_ptr, ends_ptr, first_row, num_columns, k, indices_ptr, C: tl.constexpr):
    """Write the selection of this program's row; parameters as in `topk_whole_kernel`."""
    row = first_row + tl.program_id(0).to(tl.int64)
    _, length = row_range(starts_ptr, ends_ptr, row, num_columns, C.HAS_STARTS)
    width = multiple(k, C.UNIT)
    write_whole(indices_ptr + offset_of(row, width), length, width, C.TILE)


@triton.jit
def topk_whole_kernel(
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    first_row,
    num_columns,  # at most k
    k,
    indices_ptr,  # [T, K] i32
    C: tl.constexpr,  # WholeRows
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    select_whole_row(starts_ptr, ends_ptr, first_row, num_columns, k, indices_ptr, C)
