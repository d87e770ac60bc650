"""Exact top-k of a row in two launches.

`topk_candidates_kernel` keeps, of each segment of a row, the elements that can be among the k largest. It folds the
segment onto LANES running maxima; at least k lanes reach the k-th largest maximum, so no element below that value is
among the segment's k largest. On unordered data little more than k elements pass (1.36 k at LANES = 2 k).
`topk_select_kernel` finds the exact threshold among the candidates of a row's segments, bit by bit, and writes the
winners by ascending column. A row whose candidates overflow their space, or that needs its NaN to make up k, is
searched in place instead: slower, as exact.

Thresholds are order keys: unsigned integers in the order of the floats, NaN lowest but for the absent, 0.
"""

import triton
import triton.language as tl

KEY_OF_MINUS_INF = tl.constexpr(0x007FFFFF)


@triton.jit
def order_key(x):
    """float32 → uint32 in the same order; −0 equals +0, NaN is 1, below −inf."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, key, 1)


@triton.jit
def kth_largest(keys, K: tl.constexpr, BITS: tl.constexpr):
    """The K-th largest of `keys`, from its highest bit down; all but the first BITS bits are left 0."""
    threshold = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in tl.range(0, BITS):
        enough = tl.sum((keys >= (threshold | bit)).to(tl.int32)) >= K
        threshold = tl.where(enough, threshold | bit, threshold)
        bit = bit >> 1
    return threshold


@triton.jit
def row_range(starts_ptr, ends_ptr, row, num_columns, HAS_STARTS: tl.constexpr):
    """A row's first column and its number of columns, both within the row."""
    start = 0
    if HAS_STARTS:
        start = tl.minimum(tl.maximum(tl.load(starts_ptr + row), 0), num_columns)
    # Clamped before it is subtracted from: −2**31 − start would wrap round to a large length.
    end = tl.maximum(tl.minimum(tl.load(ends_ptr + row), num_columns), start)
    return start, end - start


@triton.jit
def segment_size(length, SEGMENTS: tl.constexpr):
    """Columns a segment: the row cut evenly, on multiples of 16."""
    return tl.cdiv(tl.cdiv(length, SEGMENTS), 16) * 16


@triton.jit(do_not_specialize=["num_columns", "row_stride"])
def topk_candidates_kernel(
    logits_ptr,  # [T, N] f32
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    num_columns,
    row_stride,  # in units of STRIDE_UNIT
    candidates_ptr,  # [T, SEGMENTS, LANES] f32
    candidate_columns_ptr,  # [T, SEGMENTS, LANES] i32, relative to the row's start
    counts_ptr,  # [T, SEGMENTS] i32; above LANES: overflow
    STRIDE_UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) // SEGMENTS).to(tl.int64)
    segment = tl.program_id(0) % SEGMENTS
    start, length = row_range(starts_ptr, ends_ptr, row, num_columns, HAS_STARTS)
    if length > K:
        row_ptr = logits_ptr + row * row_stride * STRIDE_UNIT + start
        size = segment_size(length, SEGMENTS)
        first = segment * size
        end = tl.minimum(first + size, length)

        threshold = tl.full([], float("-inf"), tl.float32)
        if end - first > LANES:
            maxima = tl.full([LANES], float("-inf"), tl.float32)  # NaN never becomes a maximum
            for base in tl.range(first, end, LANES):
                column = base + tl.arange(0, LANES)
                maxima = tl.maximum(maxima, tl.load(row_ptr + column, mask=column < end, other=float("-inf")))
            # To 20 bits, rounded down: a few more candidates for fewer steps.
            key = tl.maximum(kth_largest(order_key(maxima), K, 20), KEY_OF_MINUS_INF)
            bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
            threshold = bits.to(tl.float32, bitcast=True)

        out = (row * SEGMENTS + segment) * LANES
        count = 0
        for base in tl.range(first, end, TILE):
            column = base + tl.arange(0, TILE)
            x = tl.load(row_ptr + column, mask=column < end, other=float("nan"))
            keep = x >= threshold
            place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
            fits = keep & (place < LANES)
            tl.store(candidates_ptr + out + place, x, mask=fits)
            tl.store(candidate_columns_ptr + out + place, column, mask=fits)
            count += tl.sum(keep.to(tl.int32))
        tl.store(counts_ptr + row * SEGMENTS + segment, count)


@triton.jit
def load_keys(row_ptr, column, ok):
    """Order keys of logits [BLOCK] at `column`; absent ones are 0."""
    return tl.where(ok, order_key(tl.load(row_ptr + column, mask=ok, other=0.0)), 0)


@triton.jit
def choose_candidates(
    candidates_ptr, columns_ptr, counts_ptr, out, K: tl.constexpr, SEGMENTS: tl.constexpr, LANES: tl.constexpr
):
    """Write the columns of the K largest candidates of a row, which stand by ascending column."""
    lane = tl.arange(0, SEGMENTS * LANES)
    in_use = lane % LANES < tl.load(counts_ptr + lane // LANES)
    keys = load_keys(candidates_ptr, lane, in_use)
    threshold = kth_largest(keys, K, 32)
    ties = K - tl.sum((keys > threshold).to(tl.int32))
    equal = keys == threshold
    chosen = (keys > threshold) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= ties))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out + place, tl.load(columns_ptr + lane, mask=chosen, other=0), mask=chosen)


@triton.jit
def choose_in_row(row_ptr, length, out, K: tl.constexpr, TILE: tl.constexpr):
    """Write the columns of the K largest of a row's elements; reads the row once a bit of the threshold."""
    offs = tl.arange(0, TILE)
    threshold = tl.full([], 0, tl.uint32)
    above = 0  # elements over the threshold
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in tl.range(0, 32):
        trial = threshold | bit
        reached = tl.zeros([TILE], tl.int32)
        for base in tl.range(0, length, TILE):
            column = base + offs
            reached += (load_keys(row_ptr, column, column < length) >= trial).to(tl.int32)
        count = tl.sum(reached)
        threshold = tl.where(count >= K, trial, threshold)
        above = tl.where(count >= K, above, count)
        bit = bit >> 1
    ties = K - above
    seen_equal = 0
    written = 0
    for base in tl.range(0, length, TILE):
        column = base + offs
        keys = load_keys(row_ptr, column, column < length)
        equal = keys == threshold
        rank = seen_equal + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (keys > threshold) | (equal & (rank <= ties))
        tl.store(out + written + tl.cumsum(chosen.to(tl.int32), 0) - 1, column, mask=chosen)
        seen_equal += tl.sum(equal.to(tl.int32))
        written += tl.sum(chosen.to(tl.int32))


@triton.jit(do_not_specialize=["num_columns", "row_stride"])
def topk_select_kernel(
    logits_ptr,  # [T, N] f32
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    candidates_ptr,  # [T, SEGMENTS, LANES] f32
    candidate_columns_ptr,  # [T, SEGMENTS, LANES] i32
    counts_ptr,  # [T, SEGMENTS] i32
    num_columns,
    row_stride,  # in units of STRIDE_UNIT
    indices_ptr,  # [T, K] i32
    STRIDE_UNIT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,  # 0: no candidates, every row is searched in place
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start, length = row_range(starts_ptr, ends_ptr, row, num_columns, HAS_STARTS)
    out = indices_ptr + row * K
    if length <= K:
        for base in tl.range(0, K, TILE):
            column = base + tl.arange(0, TILE)
            tl.store(out + column, tl.where(column < length, column, -1), mask=column < K)
    else:
        row_ptr = logits_ptr + row * row_stride * STRIDE_UNIT + start
        if SEGMENTS == 0:
            choose_in_row(row_ptr, length, out, K, TILE)
        else:
            counts_row = counts_ptr + row * SEGMENTS
            counts = tl.load(counts_row + tl.arange(0, SEGMENTS))
            if (tl.max(counts) > LANES) | (tl.sum(counts) < K):
                choose_in_row(row_ptr, length, out, K, TILE)
            else:
                first = row * SEGMENTS * LANES
                choose_candidates(
                    candidates_ptr + first, candidate_columns_ptr + first, counts_row, out, K, SEGMENTS, LANES
                )
