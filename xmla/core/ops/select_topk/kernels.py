"""Exact top-k of a row in two launches.

`topk_candidates_kernel` keeps the elements of a row that can be among its k largest, in one pass: those that reach a
threshold estimated from a sample, a few more than k. `topk_select_kernel` counts them. If there are at least k and no
more than fit, they contain the k largest: the kernel finds the exact threshold among them, by thirds, and writes the
winners by ascending column. A row with a misleading sample, or with too few numbers beside its NaN, is searched in
place instead, which is slower and equally exact. So the result depends only on the row, never on the sample.

Rows that do not fill the machine take as long as the longest chain of latencies and barriers. So they are split into
many segments, a search tries several thresholds at each step, and a segment fills its candidates up to whole pieces:
places are then found for pieces instead of candidates.

Order keys are unsigned integers in the order of the floats; NaN is 1, below all numbers, and 0 is an absent element.
"""

import triton
import triton.language as tl

from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.offsets import multiple, offset_of

KEY_OF_MINUS_INF = tl.constexpr(0x007FFFFF)
KEY_OF_INF = tl.constexpr(0xFF800000)
CHUNK = tl.constexpr(32)  # adjacent elements of a sample
COLUMNS_A_WARP = tl.constexpr(512)  # of a tile
SLACK_PART = tl.constexpr(24)  # a sample's rank may be missed by rank / SLACK_PART, for fewer steps of its search
HELD_PAIRS = tl.constexpr(4096)  # candidates of a row that stay in registers with their columns; more spill
ABSENT = tl.constexpr(0x7FC00000 << 32)  # a pair that is no candidate: NaN, which never reaches a threshold


@triton.jit
def order_key(x):
    """float32 → uint32 in the same order; −0 equals +0, NaN is 1, below −inf."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, key, 1)


@triton.jit
def count_two(keys, lower, upper):
    """1 for keys that reach `lower`, and 2**16 more for those that reach `upper` ≥ lower.

    As selections: LLVM counts sums of booleans as bits of a mask, which it gathers in local memory.
    """
    return tl.where(keys >= upper, 0x10001, tl.where(keys >= lower, 1, 0))


@triton.jit
def kth_largest(keys, k, low, high, count, NEAR: tl.constexpr, slack):
    """A threshold in [low, high) that at least k of `keys` reach, and the number that do.

    It is the greatest such threshold to within NEAR, or the first one found that at most k + slack reach. `count` keys
    reach `low`, at least k and fewer than 2**15; fewer than k reach `high`. Two trials share a sum, which costs more
    than the trials.
    """
    while high - low > NEAR:
        third = (high - low + 2) // 3
        lower = low + third
        upper = lower + third
        counts = tl.sum(count_two(keys, lower, upper))
        reach_lower, reach_upper = counts & 0xFFFF, counts >> 16
        high = tl.where(reach_upper >= k, high, tl.where(reach_lower >= k, upper, lower))
        low = tl.where(reach_upper >= k, upper, tl.where(reach_lower >= k, lower, low))
        count = tl.where(reach_upper >= k, reach_upper, tl.where(reach_lower >= k, reach_lower, count))
        high = tl.where(count <= k + slack, low, high)
    return low, count


@triton.jit
def kth_largest_of_few(keys, k, low, high, count, NEAR: tl.constexpr, slack, TRIALS: tl.constexpr):
    """`kth_largest` with TRIALS at a time, for keys [LANES] so few that a step's barriers cost more than its trials.

    A word counts the trials i and i + TRIALS / 2; every thread has all words, so that only one sum crosses warps.
    """
    HALF: tl.constexpr = TRIALS // 2
    word = tl.arange(0, HALF).to(tl.uint32)
    while high - low > NEAR:
        part = (high - low + TRIALS) // (TRIALS + 1)
        lower = low + part * (word + 1)
        upper = lower + part * HALF
        counts = tl.sum(count_two(keys[None, :], lower[:, None], upper[:, None]), 1)
        reach_lower, reach_upper = counts & 0xFFFF, counts >> 16
        passed = tl.sum((reach_lower >= k).to(tl.int32) + (reach_upper >= k).to(tl.int32))
        reach_lower = tl.where(reach_lower >= k, reach_lower, count)
        count = tl.min(tl.minimum(reach_lower, tl.where(reach_upper >= k, reach_upper, reach_lower)))
        low += part * passed.to(tl.uint32)
        high = tl.where(count <= k + slack, low, tl.minimum(high, low + part))
    return low, count


@triton.jit
def lanes_by_warp(COUNT: tl.constexpr):
    """0, 1, … as [COUNT / 32, 32]: each row lies in one warp, so that only the rows' totals cross warps."""
    return tl.arange(0, COUNT // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def running_count(flags):
    """The inclusive running count of booleans at `lanes_by_warp`, and their total."""
    flags = flags.to(tl.int32)
    totals = tl.sum(flags, 1)
    before = tl.cumsum(totals, 0) - totals
    return before[:, None] + tl.cumsum(flags, 1), tl.sum(totals)


@triton.jit
def running_count_of_held(flags):
    """`running_count` of booleans [N, columns] in many registers, with a third of the shuffles; no total.

    A row has at most 255 columns, and lies in one warp. The counts of four rows, a quarter of N apart and so in one
    thread, share a word: a byte each within rows, then two bytes each across rows.
    """
    ROWS: tl.constexpr = flags.shape[0] // 4
    quarter = tl.arange(0, 4)[:, None, None]
    words = tl.sum(tl.reshape(flags, [4, ROWS, flags.shape[1]]).to(tl.int32) << (8 * quarter), 0)
    of_row = tl.sum(words, 1)
    even, odd = of_row & 0xFF00FF, (of_row >> 8) & 0xFF00FF  # quarters 0 and 2, 1 and 3
    of_even, of_odd = tl.sum(even), tl.sum(odd)
    before_even, before_odd = (tl.cumsum(even, 0) - even)[None, :, None], (tl.cumsum(odd, 0) - odd)[None, :, None]
    before = tl.where(quarter % 2 == 0, before_even, before_odd)
    first, second, third = of_even & 0xFFFF, of_odd & 0xFFFF, of_even >> 16
    base = tl.where(quarter > 0, first, 0) + tl.where(quarter > 1, second, 0) + tl.where(quarter > 2, third, 0)
    count = base + (before >> (quarter // 2 * 16) & 0xFFFF) + (tl.cumsum(words, 1)[None, :, :] >> (8 * quarter) & 0xFF)
    return tl.reshape(count, flags.shape)


@triton.jit
def as_packed(ptr):
    """A pointer to (value, column) pairs as 64-bit words: the value's bits above, the column below."""
    return ptr.to(tl.pointer_type(tl.uint64), bitcast=True)


@triton.jit
def pack(value, column):
    return value.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | column.to(tl.uint32).to(tl.uint64)


@triton.jit
def key_of(pair):
    """The order key of a packed pair's value."""
    return order_key((pair >> 32).to(tl.uint32).to(tl.float32, bitcast=True))


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
def estimate_threshold(
    row_ptr, length, sample_rank, LANES: tl.constexpr, STEP: tl.constexpr, TRIALS: tl.constexpr, WARPS: tl.constexpr
):
    """A value that a few more than sample_rank · STEP of the row's elements reach, if its sample is representative.

    It is the sample_rank-th largest of the maxima of LANES lanes, onto which one CHUNK of every STEP is folded. The
    chunk's place among the STEP rotates, so that data with a period is not sampled in one phase only.
    """
    lane = tl.arange(0, LANES)
    block = lane // CHUNK
    offs = (block * STEP + block * 5 % STEP) * CHUNK + lane % CHUNK
    maxima = tl.full([LANES], float("-inf"), tl.float32)  # NaN never becomes a maximum
    blocks = length // (CHUNK * STEP)
    AT_ONCE: tl.constexpr = max(2, WARPS * 1024 // LANES)  # 32 loads per thread
    for fold in tl.range(0, tl.cdiv(blocks, LANES // CHUNK), loop_unroll_factor=AT_ONCE, disable_licm=True):
        left = blocks - fold * (LANES // CHUNK)
        x = tl.load(row_ptr + fold * (LANES * STEP) + offs, mask=block < left, other=float("-inf"))
        maxima = tl.maximum(maxima, x)
    low, high = tl.full([], KEY_OF_MINUS_INF, tl.uint32), tl.full([], KEY_OF_INF + 1, tl.uint32)
    reached = tl.full([], LANES, tl.int32)
    slack = sample_rank // SLACK_PART
    if TRIALS == 2:
        key, _ = kth_largest(order_key(maxima), sample_rank, low, high, reached, 1 << 16, slack)
    else:
        key, _ = kth_largest_of_few(order_key(maxima), sample_rank, low, high, reached, 1 << 16, slack, TRIALS)
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def count_four(k):
    """How many of 4 adjacent columns are kept, per lane."""
    return k[0].to(tl.uint32) + k[1].to(tl.uint32) + k[2].to(tl.uint32) + k[3].to(tl.uint32)


@triton.jit
def quarter(packed, i: tl.constexpr):
    """Byte i of words that hold a tile's four quarters."""
    return ((packed >> (8 * i)) & 0xFF).to(tl.int32)


@triton.jit
def load_four(ptrs, offs, left, WHOLE: tl.constexpr, UNIT: tl.constexpr):
    """Elements at ptrs and the three after, NaN from `left` on unless the tile is WHOLE."""
    if WHOLE and UNIT == 4:
        x = tl.load(ptrs[:, :, None] + tl.arange(0, 4)[None, None, :])
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 32, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    elif WHOLE:
        x0, x1, x2, x3 = tl.load(ptrs), tl.load(ptrs + 1), tl.load(ptrs + 2), tl.load(ptrs + 3)
    else:
        nan = float("nan")
        x0 = tl.load(ptrs, mask=offs < left, other=nan)
        x1 = tl.load(ptrs + 1, mask=offs + 1 < left, other=nan)
        x2 = tl.load(ptrs + 2, mask=offs + 2 < left, other=nan)
        x3 = tl.load(ptrs + 3, mask=offs + 3 < left, other=nan)
    return x0, x1, x2, x3


@triton.jit
def store_four(ptrs, k, x, column):
    """Store those kept of 4 adjacent columns one after the other, as pairs."""
    tl.store(ptrs, pack(x[0], column), mask=k[0])
    place = k[0].to(tl.int32)
    tl.store(ptrs + place, pack(x[1], column + 1), mask=k[1])
    place += k[1].to(tl.int32)
    tl.store(ptrs + place, pack(x[2], column + 2), mask=k[2])
    place += k[2].to(tl.int32)
    tl.store(ptrs + place, pack(x[3], column + 3), mask=k[3])


@triton.jit
def load_tile(ptr, last, WHOLE: tl.constexpr, WARPS: tl.constexpr, UNIT: tl.constexpr):
    """WARPS · 512 elements, NaN from `last` on unless the tile is WHOLE: four quarters, four adjacent columns per lane.

    16 tensors of a warp's width: in one tensor the scattered stores would need another layout than the loads. With a
    UNIT of 4 the four columns are one load of 16 bytes, if `ptr` is so aligned.
    """
    offs = lane_columns(WARPS)
    a = load_four(ptr + offs, offs, last, WHOLE, UNIT)
    b = load_four(ptr + (offs + 128), offs + 128, last, WHOLE, UNIT)
    c = load_four(ptr + (offs + 256), offs + 256, last, WHOLE, UNIT)
    d = load_four(ptr + (offs + 384), offs + 384, last, WHOLE, UNIT)
    return a, b, c, d


@triton.jit
def lane_columns(WARPS: tl.constexpr):
    return tl.arange(0, WARPS)[:, None] * COLUMNS_A_WARP + 4 * tl.arange(0, 32)[None, :]


@triton.jit
def no_tile(WARPS: tl.constexpr):
    """What `load_tile` returns, of no row."""
    zero = tl.zeros([WARPS, 32], tl.float32)
    return (zero, zero, zero, zero), (zero, zero, zero, zero), (zero, zero, zero, zero), (zero, zero, zero, zero)


@triton.jit
def append_tile(
    out, count, capacity, a, b, c, d, column, first, last, key_above, value_from, WHOLE: tl.constexpr,
    BY_KEY: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Append the kept elements of a tile to `out` as pairs, by ascending column; return the new count.

    Kept are elements [first, last) of the tile, whose first column is `column`, with an order key above `key_above`
    (BY_KEY) or with values from `value_from` on. Pairs past `capacity` are not stored. Only totals cross warps.
    """
    offs = lane_columns(WARPS)
    ka = wanted(a, offs, first, last, key_above, value_from, WHOLE, BY_KEY)
    kb = wanted(b, offs + 128, first, last, key_above, value_from, WHOLE, BY_KEY)
    kc = wanted(c, offs + 256, first, last, key_above, value_from, WHOLE, BY_KEY)
    kd = wanted(d, offs + 384, first, last, key_above, value_from, WHOLE, BY_KEY)
    # A byte holds a quarter's count in a warp, 128 at most, so one sum and one scan serve all four.
    kept = count_four(ka) | count_four(kb) << 8 | count_four(kc) << 16 | count_four(kd) << 24
    before = tl.cumsum(kept, 1) - kept
    warp = tl.sum(kept, 1)
    of_a, of_b, of_c = quarter(warp, 0), quarter(warp, 1), quarter(warp, 2)
    of_warp = of_a + of_b + of_c + quarter(warp, 3)
    total = tl.sum(of_warp)
    if count + total <= capacity:
        place = (tl.cumsum(of_warp, 0) - of_warp)[:, None]
        target = out + count
        at = column + offs
        store_four(target + (place + quarter(before, 0)), ka, a, at)
        place += of_a[:, None]
        store_four(target + (place + quarter(before, 1)), kb, b, at + 128)
        place += of_b[:, None]
        store_four(target + (place + quarter(before, 2)), kc, c, at + 256)
        place += of_c[:, None]
        store_four(target + (place + quarter(before, 3)), kd, d, at + 384)
    return count + total


@triton.jit
def wanted(x, offs, first, last, key_above, value_from, WHOLE: tl.constexpr, BY_KEY: tl.constexpr):
    """Which of 4 adjacent elements are kept."""
    if BY_KEY:
        k0, k1 = order_key(x[0]) > key_above, order_key(x[1]) > key_above
        k2, k3 = order_key(x[2]) > key_above, order_key(x[3]) > key_above
        if not WHOLE:
            k0 &= (offs >= first) & (offs < last)
            k1 &= (offs + 1 >= first) & (offs + 1 < last)
            k2 &= (offs + 2 >= first) & (offs + 2 < last)
            k3 &= (offs + 3 >= first) & (offs + 3 < last)
    else:
        k0, k1, k2, k3 = x[0] >= value_from, x[1] >= value_from, x[2] >= value_from, x[3] >= value_from
    return k0, k1, k2, k3


@triton.jit(do_not_specialize=["first_row", "num_columns", "row_stride", "k", "sample_rank"])
def topk_candidates_kernel(
    logits_ptr,  # [T, N] f32
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
    HAS_STARTS: tl.constexpr,
    UNIT: tl.constexpr,  # of a row's first element
    SEGMENTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PIECE: tl.constexpr,  # a segment's candidates are filled up to whole pieces; 0: they are not
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    TRIALS: tl.constexpr,
    EARLY: tl.constexpr,  # the first tile is loaded before the sample
    WARPS: tl.constexpr,
    BESIDE: tl.constexpr,
):
    let_next_start(BESIDE)
    row = (tl.program_id(0) // SEGMENTS).to(tl.int64)
    segment = tl.program_id(0) % SEGMENTS
    start, length = row_range(starts_ptr, ends_ptr, first_row + row, num_columns, HAS_STARTS)
    wait_for_earlier(BESIDE)
    if length > k:
        row_ptr = logits_ptr + offset_of(row, multiple(row_stride, UNIT)) + start
        TILE: tl.constexpr = WARPS * COLUMNS_A_WARP
        tiles = tl.cdiv(tl.cdiv(length, TILE), SEGMENTS)
        first = segment * tiles * TILE
        whole = tl.maximum(tl.minimum(length - first, tiles * TILE), 0) // TILE
        a, b, c, d = no_tile(WARPS)
        if EARLY:
            if whole > 0:
                a, b, c, d = load_tile(row_ptr + first, TILE, True, WARPS, UNIT)
        threshold = tl.full([], float("-inf"), tl.float32)
        if length > CAPACITY:
            threshold = estimate_threshold(row_ptr, length, sample_rank, LANES, STEP, TRIALS, WARPS)
        if segment == 0:
            tl.store(thresholds_ptr + row, threshold)

        out = as_packed(candidates_ptr) + offset_of(offset_of(row, SEGMENTS) + segment, CAPACITY)
        count = tl.zeros([], tl.int32)
        if whole > 0:
            if not EARLY:
                a, b, c, d = load_tile(row_ptr + first, TILE, True, WARPS, UNIT)
            # A tile is loaded while the one before it is examined; after the last tile it is loaded once more.
            for tile in tl.range(0, whole):
                x, y, z, w = a, b, c, d
                after = first + tl.minimum(tile + 1, whole - 1) * TILE
                a, b, c, d = load_tile(row_ptr + after, TILE, True, WARPS, UNIT)
                at = first + tile * TILE
                count = append_tile(out, count, CAPACITY, x, y, z, w, at, 0, TILE, 0, threshold, True, False, WARPS)
        if whole < tiles:
            at = first + whole * TILE
            x, y, z, w = load_tile(row_ptr + at, length - at, False, WARPS, UNIT)
            count = append_tile(out, count, CAPACITY, x, y, z, w, at, 0, TILE, 0, threshold, False, False, WARPS)
        tl.store(counts_ptr + offset_of(row, SEGMENTS) + segment, count)
        if PIECE:
            if count <= CAPACITY:
                lane = tl.arange(0, PIECE)
                absent = tl.full([PIECE], ABSENT, tl.uint64)
                tl.store(out + count + lane, absent, mask=lane < tl.cdiv(count, PIECE) * PIECE - count)


@triton.jit
def candidate_places(lane, counts_row, SEGMENTS: tl.constexpr, CAPACITY: tl.constexpr):
    """Places of the candidates at `lane` of a row: the first counts_row[s] of each of SEGMENTS spaces of CAPACITY."""
    place = lane
    before = tl.load(counts_row)
    for segment in tl.static_range(1, SEGMENTS):
        place = tl.where(lane >= before, segment * CAPACITY + lane - before, place)
        before += tl.load(counts_row + segment)
    return place


@triton.jit
def write_chosen(
    candidates_ptr, counts_row, total, out, threshold, ties, SEGMENTS: tl.constexpr, CAPACITY: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Write the columns of the candidates over the order key `threshold` and of the first `ties` that equal it."""
    written = 0
    seen_equal = 0
    part = lanes_by_warp(WARPS * 128)
    for base in tl.range(0, total, WARPS * 128):
        lane = base + part
        in_use = lane < total
        place = candidate_places(lane, counts_row, SEGMENTS, CAPACITY)
        pair = tl.load(candidates_ptr + place, mask=in_use, other=0)
        key = tl.where(in_use, key_of(pair), 0)
        equal = (key == threshold) & in_use
        rank, equals = running_count(equal)
        chosen = (key > threshold) | (equal & (seen_equal + rank <= ties))
        rank, more = running_count(chosen)
        tl.store(out + written + rank - 1, pair.to(tl.uint32).to(tl.int32, bitcast=True), mask=chosen)
        seen_equal += equals
        written += more


@triton.jit
def choose_candidates(
    candidates_ptr, counts_row, total, out, k, SEGMENTS: tl.constexpr, CAPACITY: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write the columns of the k largest of a row's `total` candidates, which are in order of ascending column.

    They lie at `candidate_places`; LANES is a bound of `total`.
    """
    lane = lanes_by_warp(LANES)
    place = candidate_places(lane, counts_row, SEGMENTS, CAPACITY)
    in_use = lane < total
    pair = tl.load(candidates_ptr + place, mask=in_use, other=0)
    keys = key_of(pair)
    least = tl.min(tl.where(in_use, keys, 0xFFFFFFFF))
    keys = tl.where(in_use, keys, 0)
    threshold, reached = kth_largest(keys, k, least, tl.max(keys) + 1, total, 1, 0)
    if LANES <= HELD_PAIRS:
        write_held(pair, keys, threshold, reached, out, k)
    else:
        ties = k - tl.sum((keys > threshold).to(tl.int32))
        write_chosen(candidates_ptr, counts_row, total, out, threshold, ties, SEGMENTS, CAPACITY, WARPS)


@triton.jit
def choose_pieces(
    candidates_ptr, ends, threshold, total, out, k, SEGMENTS: tl.constexpr, CAPACITY: tl.constexpr,
    PIECE: tl.constexpr, TRIALS: tl.constexpr,
):  # fmt: skip
    """`choose_candidates` of candidates that fill whole pieces, `ends` [SEGMENTS] of them up to a segment's last one.

    They are at most CAPACITY with what fills their pieces up, and each reaches `threshold`.
    """
    # A piece lies after the segments that end at or before it. One word has the end of the last of these, which grows
    # with their number, and that number.
    piece = tl.arange(0, CAPACITY // PIECE)
    tagged = ends << 8 | (tl.arange(0, SEGMENTS) + 1)
    passed = tl.max(tl.where(ends[:, None] <= piece[None, :], tagged[:, None], 0), 0)
    place = (passed & 0xFF) * CAPACITY + (piece - (passed >> 8)) * PIECE
    in_use = piece < tl.max(ends)
    # Not called contiguous: threads would hold two adjacent pairs, and the store below would need another layout.
    lane = tl.max_contiguous(place[:, None] + tl.arange(0, PIECE)[None, :], [1, 1])
    pair = tl.load(candidates_ptr + lane, mask=in_use[:, None], other=ABSENT)
    keys = key_of(pair)
    held = tl.reshape(keys, [CAPACITY])
    threshold, reached = kth_largest_of_few(held, k, order_key(threshold), tl.max(keys) + 1, total, 1, 0, TRIALS)
    write_held(pair, keys, threshold, reached, out, k)


@triton.jit
def write_held(pair, keys, threshold, reached, out, k):
    """Write the columns of the k largest of pairs by ascending column, of which `reached` ≥ k reach `threshold`."""
    chosen = keys >= threshold
    if reached > k:  # more than k with the ties: the first of these
        ties = k - tl.sum((keys > threshold).to(tl.int32))
        rank = running_count_of_held(keys == threshold)
        chosen = (keys > threshold) | ((keys == threshold) & (rank <= ties))
    rank = running_count_of_held(chosen)
    tl.store(out + rank - 1, pair.to(tl.uint32).to(tl.int32, bitcast=True), mask=chosen)


@triton.jit
def load_keys(row_ptr, column, ok):
    """Order keys of logits [BLOCK] at `column`; absent ones are 0."""
    return tl.where(ok, order_key(tl.load(row_ptr + column, mask=ok, other=0.0)), 0)


@triton.jit
def choose_in_row(row_ptr, length, out, k, TILE: tl.constexpr):
    """Write the columns of the k largest of a row's elements; reads the row once per bit of the threshold."""
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
        threshold = tl.where(count >= k, trial, threshold)
        above = tl.where(count >= k, above, count)
        bit = bit >> 1
    ties = k - above
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


@triton.jit
def select_row(
    logits_ptr, starts_ptr, ends_ptr, candidates_ptr, counts_ptr, thresholds_ptr, first_row, num_columns, row_stride, k,
    indices_ptr, HAS_STARTS: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr, SEGMENTS: tl.constexpr,
    CAPACITY: tl.constexpr, PIECE: tl.constexpr, TRIALS: tl.constexpr, WARPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the selection of this program's row; parameters as in `topk_select_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    start, length = row_range(starts_ptr, ends_ptr, first_row + row, num_columns, HAS_STARTS)
    if K:
        k = K
    width = multiple(k, UNIT)
    out = indices_ptr + offset_of(first_row + row, width)
    if length <= k:
        for base in tl.range(0, width, TILE):
            column = base + tl.arange(0, TILE)
            tl.store(out + column, tl.where(column < length, column, -1), mask=column < width)
    else:
        row_ptr = logits_ptr + offset_of(row, row_stride) + start
        if SEGMENTS == 0:
            choose_in_row(row_ptr, length, out, k, TILE)
        elif PIECE:
            counts = tl.load(counts_ptr + offset_of(row, SEGMENTS) + tl.arange(0, SEGMENTS))
            threshold = tl.load(thresholds_ptr + row)
            total = tl.sum(counts)
            ends = tl.cumsum(tl.cdiv(counts, PIECE))
            if (tl.max(ends) > CAPACITY // PIECE) | (total < k):
                choose_in_row(row_ptr, length, out, k, TILE)
            else:
                candidates = as_packed(candidates_ptr) + offset_of(row, SEGMENTS * CAPACITY)
                choose_pieces(candidates, ends, threshold, total, out, k, SEGMENTS, CAPACITY, PIECE, TRIALS)
        else:
            counts_row = counts_ptr + offset_of(row, SEGMENTS)
            total = tl.sum(tl.load(counts_row + tl.arange(0, SEGMENTS)))
            if (total > CAPACITY) | (total < k):
                choose_in_row(row_ptr, length, out, k, TILE)
            else:
                candidates = as_packed(candidates_ptr) + offset_of(row, SEGMENTS * CAPACITY)
                choose_candidates(candidates, counts_row, total, out, k, SEGMENTS, CAPACITY, CAPACITY, WARPS)


@triton.jit(do_not_specialize=["first_row", "num_columns", "row_stride", "k"])
def topk_select_kernel(
    logits_ptr,  # [T, N] f32
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    candidates_ptr,  # [T, SEGMENTS, CAPACITY] pairs
    counts_ptr,  # [T, SEGMENTS] i32
    thresholds_ptr,  # [T] f32 if PIECE
    first_row,  # of those of logits
    num_columns,
    row_stride,
    k,
    indices_ptr,  # [T, K] i32
    HAS_STARTS: tl.constexpr,
    K: tl.constexpr,  # k, compiled in; 0: it is not
    UNIT: tl.constexpr,  # of k
    SEGMENTS: tl.constexpr,  # 0: no candidates, every row is searched in place
    CAPACITY: tl.constexpr,
    PIECE: tl.constexpr,
    TRIALS: tl.constexpr,
    WARPS: tl.constexpr,
    TILE: tl.constexpr,
    BESIDE: tl.constexpr,
):
    let_next_start(BESIDE)
    wait_for_earlier(BESIDE)
    select_row(
        logits_ptr, starts_ptr, ends_ptr, candidates_ptr, counts_ptr, thresholds_ptr, first_row, num_columns,
        row_stride, k, indices_ptr, HAS_STARTS, K, UNIT, SEGMENTS, CAPACITY, PIECE, TRIALS, WARPS, TILE,
    )  # fmt: skip
