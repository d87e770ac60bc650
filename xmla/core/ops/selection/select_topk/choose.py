"""The k largest of a row's candidates, or of a row in place, by ascending column."""

import triton
import triton.language as tl

from xmla.core.ops.selection.select_topk.pairs import ABSENT, key_of, order_key
from xmla.core.ops.selection.select_topk.search import kth_largest, kth_largest_of_few

HELD_PAIRS = tl.constexpr(4096)  # candidates of a row that stay in registers with their columns; more spill


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
def candidate_places(lane, counts_row, SEGMENTS: tl.constexpr, CAPACITY: tl.constexpr):
    """Places of the candidates at `lane` of a row: the first counts_row[s] of each of SEGMENTS spaces of CAPACITY."""
    place = lane
    before = tl.load(counts_row)
    for segment in tl.static_range(1, SEGMENTS):
        place = tl.where(lane >= before, segment * CAPACITY + lane - before, place)
        before += tl.load(counts_row + segment)
    return place


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
def load_keys(row_ptr, column, ok):
    """Order keys of logits [BLOCK] at `column`; absent ones are 0."""
    return tl.where(ok, order_key(tl.load(row_ptr + column, mask=ok, other=0.0).to(tl.float32)), 0)


@triton.jit
def choose_in_row(row_ptr, length, guess, out, k, TILE: tl.constexpr):
    """Write the columns of the k largest of a row's elements, of which there are more than k.

    Where many elements equal the value `guess`, it is often the k-th: a first reading counts those that reach it, and
    that exceed it. Otherwise the key of the k-th is looked for in an interval that is at first that of all of the row,
    or ends at the guess. Each reading divides it by four, until no more than k reach it, or it is one key.
    """
    offs = tl.arange(0, TILE)
    reach_guess, reach_more = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for base in tl.range(0, length, TILE):
        x = tl.load(row_ptr + base + offs, mask=base + offs < length, other=float("nan")).to(tl.float32)
        reach_guess += (x >= guess).to(tl.int32)
        reach_more += (x > guess).to(tl.int32)
    reach_guess, reach_more = tl.sum(reach_guess), tl.sum(reach_more)
    low, reached = order_key(guess), reach_guess  # elements that reach `low`
    high, beyond = low + 1, reach_more  # and `high`, which are fewer than k
    if (reach_guess < k) | (reach_more >= k):
        least, most = tl.full([TILE], 0xFFFFFFFF, tl.uint32), tl.zeros([TILE], tl.uint32)
        for base in tl.range(0, length, TILE):
            column = base + offs
            keys = load_keys(row_ptr, column, column < length)
            most = tl.maximum(most, keys)
            least = tl.minimum(least, tl.where(column < length, keys, 0xFFFFFFFF))
        if reach_guess < k:
            low, reached, high, beyond = tl.min(least), length, low, reach_guess
        else:
            low, reached, high, beyond = high, reach_more, tl.max(most) + 1, 0
    while (high - low > 1) & (reached > k):
        part, start = (high - low + 3) // 4, low
        reach_first, reach_second = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
        reach_third = tl.zeros([TILE], tl.int32)
        for base in tl.range(0, length, TILE):
            column = base + offs
            keys = load_keys(row_ptr, column, column < length)
            reach_first += (keys >= start + part).to(tl.int32)
            reach_second += (keys >= start + 2 * part).to(tl.int32)
            reach_third += (keys >= start + 3 * part).to(tl.int32)
        for trial in tl.static_range(3):
            count = tl.sum(reach_first if trial == 0 else reach_second if trial == 1 else reach_third)
            low, reached, high, beyond = narrowed(low, reached, high, beyond, start + (trial + 1) * part, count, k)
    # Elements over `low`, and of those that equal it the first; all that reach it if these are k.
    exact = reached == k
    over = tl.where(exact, low - 1, low)
    ties = tl.where(exact, 0, k - beyond)
    base, above, equal = 0, 0, 0
    while (base < length) & (above + tl.minimum(equal, ties) < k):
        column = base + offs
        keys = load_keys(row_ptr, column, column < length)
        marks = (keys > over).to(tl.int32) | (keys == over).to(tl.int32) << 16
        upto = tl.cumsum(marks, 0)
        rank = equal + (upto >> 16)
        chosen = (keys > over) | ((keys == over) & (rank <= ties))
        tl.store(out + above + (upto & 0xFFFF) + tl.minimum(rank, ties) - 1, column, mask=chosen)
        total = tl.sum(marks)
        above += total & 0xFFFF
        equal += total >> 16
        base += TILE


@triton.jit
def narrowed(low, reached, high, beyond, trial, count, k):
    """An interval [low, high) of keys that at least k and fewer than k elements reach, once `count` reach a trial."""
    enough = (count >= k) & (trial >= low)
    less = (count < k) & (trial <= high)
    low, reached = tl.where(enough, trial, low), tl.where(enough, count, reached)
    high, beyond = tl.where(less, trial, high), tl.where(less, count, beyond)
    return low, reached, high, beyond
