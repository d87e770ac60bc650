"""Exact top-k of short rows in one launch for Hopper: a row is in the registers of one CTA, eight elements a thread.

    columns 32 · EACH · w on of warp w ─→ order keys in registers ─→ the greatest and the least
    interval of the k-th, first the four octaves below the greatest ─→ histogram of 256 bins ─→ each warp finds the bin
      of the k-th by itself: the next interval, until all of it are chosen, or it is one key (two as a rule)
    chosen columns before each, in its warp and in the warps before ─→ indices, by column

Each step of this chain is a barrier and instructions for each element of a thread, so that as many warps as an SM has
take the least time of a row. What is equal to the k-th is chosen by column, so no result depends on the order of atomic
additions. NaN, of which all have one key, is like any other value.
"""

from xmla.core.lang.gluon import add, gl, gluon
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.keys import KEY_OF_NAN, order_key, page_of, shift_of

BITS = gl.constexpr(8)
BINS = gl.constexpr(1 << 8)  # of an interval
LEVELS = gl.constexpr(5)  # intervals that end at single keys: one of octaves, and four of all keys
OCTAVES = gl.constexpr((4 << 23) - 1)  # the first interval: a bin is a 64th of an octave
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def elements(warps, each):
    """Registers of a row's elements [WARPS, 32 · EACH], adjacent ones of a thread."""
    return gl.BlockedLayout([1, each], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def in_every_warp(size, warps):
    """Registers of a vector that each warp has whole."""
    return gl.BlockedLayout([max(1, size // 32)], [32], [warps], [0])


@gluon.jit
def load_row(row_ptr, column, length, UNIT: gl.constexpr):
    """Elements of a row; absent columns are NaN, after all that are there."""
    if UNIT >= 4:
        # A mask of four columns alike makes one load of them; the last ones, of less than four, are loaded behind it.
        four = column // 4 * 4
        x = gl.load(row_ptr + column, mask=four + 4 <= length, other=float("nan")).to(gl.float32)
        if length % 4 != 0:
            last = gl.load(row_ptr + column, mask=(four + 4 > length) & (column < length), other=float("nan"))
            x = gl.where(four + 4 <= length, x, last.to(gl.float32))
    else:
        x = gl.load(row_ptr + column, mask=column < length, other=float("nan")).to(gl.float32)
    return x


@gluon.jit
def least_of(high, span):
    """The least key of an interval, or of all that there are if it reaches further."""
    most = (high - KEY_OF_NAN).to(gl.uint32, bitcast=True)
    return high - gl.minimum(span, most).to(gl.int32, bitcast=True)


@gluon.jit
def interval_of_kth(keys, k, length, C: gl.constexpr):
    """The least and the greatest key of an interval that has the k-th, how many of it are among the k largest, and
    whether all of them are.

    If not, it is one key.
    """
    WARPS: gl.constexpr = C.WARPS
    COLUMNS: gl.constexpr = 32 * C.EACH * WARPS
    EVERY: gl.constexpr = in_every_warp(BINS, WARPS)
    ENDS: gl.constexpr = in_every_warp(WARPS, WARPS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    hists = gl.allocate_shared_memory(gl.int32, [LEVELS, 2 * BINS], FLAT)
    ends = gl.allocate_shared_memory(gl.int32, [2, WARPS], FLAT)
    for level in gl.static_range(LEVELS):
        hists.index(level).store(gl.zeros([2 * BINS], gl.int32, LINE))
    ends.index(0).store(gl.max(keys, 1))
    ends.index(1).store(gl.min(keys, 1))
    high = gl.max(ends.index(0).load(ENDS), 0)
    low = gl.min(ends.index(1).load(ENDS), 0)
    keys = gl.reshape(keys, [COLUMNS])
    K: gl.constexpr = keys.type.layout
    # What is outside of the interval is counted too, by each lane aside: without a branch for each element.
    aside = BINS + gl.arange(0, COLUMNS, layout=K) // C.EACH % 32
    span = (high - low).to(gl.uint32, bitcast=True)
    if k // 2 <= length // 5:  # otherwise the k-th is presumably further down
        span = gl.minimum(span, OCTAVES)
    shift = shift_of(span, BITS)
    need = k  # of those in the interval
    level = 0
    whole = gl.to_tensor(0)
    more = span > 0
    while more:
        # All of the bins, also what they reach beyond the span.
        span = (gl.to_tensor(BINS).to(gl.uint32) << shift) - 1
        hist = hists.index(level)
        down = (high - keys).to(gl.uint32, bitcast=True)
        at = gl.where(down <= span, (down >> shift).to(gl.int32), aside)
        hist.atomic_scatter_add(gl.full([COLUMNS], 1, gl.int32, K), at, 0)
        upto = gl.associative_scan(hist.slice(0, BINS).load(EVERY), 0, add)
        before = upto < need  # whether a bin and all before it have less
        bin = gl.sum(before.to(gl.int32), 0)
        if bin == BINS:  # all of them are chosen, and some of what is below them
            need -= gl.max(upto, 0)
            high = least_of(high, span) - 1
            span = (high - low).to(gl.uint32, bitcast=True)
            shift = shift_of(span, BITS)
            more = span > 0
        else:
            whole = (gl.min(gl.where(before, COLUMNS, upto), 0) == need).to(gl.int32)
            need -= gl.max(gl.where(before, upto, 0), 0)
            high -= (bin.to(gl.uint32) << shift).to(gl.int32, bitcast=True)
            span = (gl.to_tensor(1).to(gl.uint32) << shift) - 1
            more = (whole == 0) & (span > 0)
            shift = gl.maximum(shift.to(gl.int32) - BITS, 0).to(gl.uint32)
        level += 1
    return least_of(high, span), high, need, whole


@gluon.jit
def ahead_of(flags, C: gl.constexpr):
    """How many of a row's flags are before each, and how many there are."""
    WARPS: gl.constexpr = C.WARPS
    X: gl.constexpr = elements(WARPS, C.EACH)
    P: gl.constexpr = elements(WARPS, 1)
    upto = gl.associative_scan(flags, 1, add)
    counts = gl.allocate_shared_memory(gl.int32, [WARPS], FLAT)
    counts.store(gl.max(upto, 1))
    of_warps = counts.load(gl.SliceLayout(0, P))
    other = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, P)), 0)
    own = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, P)), 1)
    before = gl.sum(gl.where(other < own, gl.expand_dims(of_warps, 0), 0), 1)
    before = gl.expand_dims(gl.convert_layout(before, gl.SliceLayout(1, X), assert_trivial=True), 1)
    return before + upto - flags, gl.sum(of_warps, 0)


@gluon.jit
def pages_of(table_row, width, length, C: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The pages [WARPS, 32 · EACH] of columns, of a thread one."""
    WARPS: gl.constexpr = C.WARPS
    X: gl.constexpr = gl.BlockedLayout([1, 1, C.EACH], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X))), 1)
    lane = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, X))), 0)
    page = page_of((warp * 32 + lane) * C.EACH, table_row, width, length, PAGE_SIZE)
    pages = gl.expand_dims(page, 2) + gl.zeros([WARPS, 32, C.EACH], gl.int32, X)
    return gl.reshape(pages, [WARPS, 32 * C.EACH])


@gluon.jit
def choose_in_cta(row_ptr, length, k, out, slots, table_row, width, C: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Write the columns of the k largest of a row's elements, more than k and no more than the threads hold.

    With a PAGE_SIZE their slots too; returns whether that was done: if all of them have a page.
    """
    WARPS: gl.constexpr = C.WARPS
    EACH: gl.constexpr = C.EACH
    X: gl.constexpr = elements(WARPS, EACH)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, X)), 1)
    column = warp * (32 * EACH) + gl.expand_dims(gl.arange(0, 32 * EACH, layout=gl.SliceLayout(0, X)), 0)
    x = load_row(row_ptr, column, length, C.UNIT)
    if PAGE_SIZE:
        pages = gl.convert_layout(pages_of(table_row, width, length, C, PAGE_SIZE), X, assert_trivial=True)
    keys = order_key(x)
    least, high, need, whole = interval_of_kth(keys, k, length, C)
    chosen = (keys >= least).to(gl.int32)
    if whole == 0:  # of equal ones the first by column
        tied = (keys == high).to(gl.int32)
        before, _ = ahead_of(tied, C)
        chosen = gl.where((tied != 0) & (before >= need), 0, chosen)
    if PAGE_SIZE:
        before, total = ahead_of(chosen | ((chosen != 0) & (pages < 0)).to(gl.int32) << 16, C)
        before &= 0xFFFF
        gl.store(slots + before, pages * PAGE_SIZE + column % PAGE_SIZE, mask=chosen != 0)
    else:
        before, total = ahead_of(chosen, C)
    gl.store(out + before, column, mask=chosen != 0)
    return total >> 16 == 0
