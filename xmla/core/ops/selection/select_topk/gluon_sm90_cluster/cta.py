"""Exact top-k of short rows in one launch for Hopper: a row is in the registers of one CTA.

    columns 128 · (TILES · w + t) on of warp w, tile t ─→ the greatest and the least
    BINS equal parts of what is between them ─→ histogram ─→ the bin of the k-th
    what is in that bin ─→ a list ─→ the rank of each: the k-th and its column
    chosen columns before each, in its warp and in the warps before ─→ indices, by column

A bin is found from a float by a subtraction, a product and an addition, each of which keeps the order, so that elements
of a bin before another's are greater, whatever is rounded. A bin has some ten elements where values lie as a sum's do.
Of a row where it has more than a list takes, the k-th is found by order keys instead, as an interval that is narrowed.
What is equal to the k-th is chosen by column, so no result depends on the order of atomic additions. NaN, of which all
have one key, is like any other value.
"""

from xmla.core.lang.gluon import add, gl, gluon
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.keys import (
    KEY_OF_INF,
    KEY_OF_NAN,
    order_key,
    page_of,
    shift_of,
    value_of,
)

BITS = gl.constexpr(8)
PARTS = gl.constexpr(1 << 8)  # of an interval
LEVELS = gl.constexpr(5)  # intervals that end at single keys: one of octaves, and four of all keys
OCTAVES = gl.constexpr((4 << 23) - 1)  # the first interval: a part is a 64th of an octave
WHOLE = gl.constexpr(float(1 << 23))  # what is added to this is rounded to an integer, in the last bits
BITS_OF_WHOLE = gl.constexpr(0x4B000000)
LIST = gl.constexpr(64)  # elements of a bin that are ranked beside each other
SHORT_LIST = gl.constexpr(32)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def elements(warps, tiles):
    """Registers of a row's elements [WARPS, TILES, 32, 4]."""
    return gl.BlockedLayout([1, tiles, 1, 4], [1, 1, 32, 1], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def lanes(warps):
    """Registers of a number of each lane [WARPS, 32]."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def in_every_warp(size, warps):
    """Registers of a vector that each warp has whole."""
    return gl.BlockedLayout([max(1, size // 32)], [32], [warps], [0])


@gluon.constexpr_function
def beside_each_other(few, warps):
    """Registers of a few elements beside the same few: those of a warp beside all."""
    return gl.BlockedLayout([max(1, few // warps), few // 32], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def append_ptx(outputs, inputs):
    """PTX by which each thread appends to a list the values in a bin, each with its column."""
    (pairs,), (length,), (bin,), (first,), bins, values = inputs
    lines = [".reg .pred there, any;", ".reg .b32 place, column;", "mov.u32 place, 0;", "mov.u32 column, 0;"]
    # Most threads have none.
    lines += [f"setp.eq.u32 any, {bins[0]}, {bin};", *(f"setp.eq.or.u32 any, {each}, {bin}, any;" for each in bins[1:])]
    lines += ["@!any bra done;"]
    for i, (each, value) in enumerate(zip(bins, values, strict=True)):
        lines += [
            f"setp.eq.u32 there, {each}, {bin};",
            f"@there atom.shared.add.u32 place, [{length}], 1;",
            f"@there mad.lo.u32 place, place, 8, {pairs};",
            f"@there add.u32 column, {first}, {i // 4 * 128 + i % 4};",
            "@there st.shared.v2.b32 [place], {column, " + value + "};",
        ]
    return "\n".join(["{", *lines, "done:", "}"])


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
def columns_of(WARPS: gl.constexpr, TILES: gl.constexpr):
    """The columns [WARPS, TILES, 32, 4] of a row in three parts: a thread's first, and on to tiles and to fours."""
    X: gl.constexpr = elements(WARPS, TILES)
    X3: gl.constexpr = gl.SliceLayout(3, X)
    X2: gl.constexpr = gl.SliceLayout(2, X3)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, X2)), 1)
    tile = gl.expand_dims(gl.arange(0, TILES, layout=gl.SliceLayout(0, X2)), 0)
    lane = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, X3))), 0), 1)
    one = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, X))))
    first = gl.expand_dims(gl.expand_dims(warp * (TILES * 128), 2) + lane * 4, 3)
    one = gl.expand_dims(gl.expand_dims(gl.expand_dims(one, 0), 1), 2)
    return first, gl.expand_dims(gl.expand_dims(tile, 2), 3) * 128, one


@gluon.jit
def hidden(x):
    """A number of which the compiler does not know that it is `x`: what is added to it is not kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_of_bytes(word, ones, more):
    """The sum of those bytes of a word that have a one, and of `more`."""
    return gl.inline_asm_elementwise(
        "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [word, ones, more], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def flags_of(x, threshold, offset, last):
    """1 for elements above a threshold, and for those that equal it up to the last: numbers, which the compiler does
    not gather as bits of a mask.
    """
    none = gl.zeros_like(offset)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.le.s32 p, $3, $4; setp.eq.and.f32 p, $1, $2, p; setp.gt.or.f32 p, $1, $2, p; "
        "selp.b32 $0, 1, 0, p; }",
        "=r,f,f,r,r", [x, threshold + none.to(gl.float32), offset, last + none], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def word_of(tiles):
    """A word with a byte for each tile: a warp has at most 128 flags of one."""
    return gl.uint32 if tiles <= 4 else gl.uint64


@gluon.jit
def places_of(flags, marks, counts, C: gl.constexpr):
    """How many of a row's flags [WARPS, TILES, 32, 4] are before each and with it; how many there are, and 2**20 for
    each warp that has a mark.
    """
    WARPS: gl.constexpr = C.WARPS
    TILES: gl.constexpr = C.TILES
    WORD: gl.constexpr = word_of(TILES)
    P: gl.constexpr = lanes(WARPS)
    X3: gl.constexpr = gl.SliceLayout(3, elements(WARPS, TILES))
    X2: gl.constexpr = gl.SliceLayout(1, X3)
    X1: gl.constexpr = gl.SliceLayout(1, X2)
    upto = gl.associative_scan(flags, 3, add)
    tile = gl.expand_dims(gl.arange(0, TILES, layout=gl.SliceLayout(0, gl.SliceLayout(2, X3))), 0)
    shift = gl.expand_dims(tile * 8, 2).to(WORD)
    own = gl.convert_layout(gl.sum(gl.sum(flags, 3).to(WORD) << shift, 1), P, assert_trivial=True)  # [WARPS, 32]
    before = gl.associative_scan(own, 1, add) - own
    low = gl.sum(own.to(gl.uint32), 1)
    none = gl.zeros_like(low)
    of_warp = sum_of_bytes(low, none + 0x01010101, marks << 20)
    if TILES > 4:
        high = gl.sum((own >> 32).to(gl.uint32), 1)
        of_warp = sum_of_bytes(high, none + 0x01010101, of_warp)
    counts.store(of_warp)
    of_warps = counts.load(gl.SliceLayout(0, P))
    other = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, P)), 0)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, P)), 1)
    base = gl.sum(gl.where(other < warp, gl.expand_dims(of_warps, 0), 0), 1) & 0xFFFFF  # [WARPS]
    # Of the tiles before.
    none = gl.zeros([WARPS, TILES, 1], gl.uint32, X3)
    ones = (gl.zeros([WARPS, TILES, 1], WORD, X3) + 1 << shift) - 1
    base = none.to(gl.int32) + of_each_tile(base, X1)
    base = sum_of_bytes(none + of_each_tile(low, X1), ones.to(gl.uint32) & 0x01010101, base)
    if TILES > 4:
        base = sum_of_bytes(none + of_each_tile(high, X1), (ones >> 32).to(gl.uint32) & 0x01010101, base)
    before = gl.expand_dims(gl.convert_layout(before, X2, assert_trivial=True), 1)
    before = base + (before >> shift & 255).to(gl.int32)
    return gl.expand_dims(before, 3) + upto, gl.sum(of_warps, 0)


@gluon.jit
def of_each_tile(x, LAYOUT: gl.constexpr):
    """A number of each warp for [WARPS, TILES, 1]."""
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(x, LAYOUT, assert_trivial=True), 1), 1)


@gluon.jit
def kth_of_list(pairs, count, k, best, MOST: gl.constexpr, WARPS: gl.constexpr):
    """Write the order key and the column of the k-th of a list, which has at most MOST."""
    PAIRS: gl.constexpr = beside_each_other(MOST, WARPS)
    MINE: gl.constexpr = gl.SliceLayout(1, PAIRS)
    OTHER: gl.constexpr = gl.SliceLayout(0, PAIRS)
    key, column = key_and_column(pairs.slice(0, MOST).load(MINE))
    there = gl.arange(0, MOST, layout=MINE) < count
    other_key, other_column = key_and_column(pairs.slice(0, MOST).load(OTHER))
    other_key = gl.where(gl.arange(0, MOST, layout=OTHER) < count, other_key, -0x7FFFFFFF - 1)
    other_key, other_column = gl.expand_dims(other_key, 0), gl.expand_dims(other_column, 0)
    equal = other_key == gl.expand_dims(key, 1)
    earlier = (other_key > gl.expand_dims(key, 1)) | (equal & (other_column < gl.expand_dims(column, 1)))
    is_kth = there & (gl.sum(earlier.to(gl.int32), 1) == k - 1)
    # All lanes of a warp have the same: the greatest is what one writes.
    best.index(0).atomic_scatter_max(key, gl.zeros_like(key), 0, is_kth)
    best.index(1).atomic_scatter_max(column, gl.zeros_like(column), 0, is_kth)


@gluon.jit
def key_and_column(pair):
    """A pair's value as an order key, and its column, from the value's bits and the column."""
    return order_key((pair >> 32).to(gl.int32).to(gl.float32, bitcast=True)), pair.to(gl.int32)


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
    COLUMNS: gl.constexpr = 128 * C.TILES * WARPS
    EVERY: gl.constexpr = in_every_warp(PARTS, WARPS)
    ENDS: gl.constexpr = in_every_warp(WARPS, WARPS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    hists = gl.allocate_shared_memory(gl.int32, [LEVELS, 2 * PARTS], FLAT)
    ends = gl.allocate_shared_memory(gl.int32, [2, WARPS], FLAT)
    for level in gl.static_range(LEVELS):
        hists.index(level).store(gl.zeros([2 * PARTS], gl.int32, LINE))
    ends.index(0).store(gl.max(keys, 1))
    ends.index(1).store(gl.min(keys, 1))
    high = gl.max(ends.index(0).load(ENDS), 0)
    low = gl.min(ends.index(1).load(ENDS), 0)
    keys = gl.reshape(keys, [COLUMNS])
    K: gl.constexpr = keys.type.layout
    # What is outside of the interval is counted too, by each lane aside: without a branch for each element.
    aside = PARTS + gl.arange(0, COLUMNS, layout=K) // 4 % 32
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
        span = (gl.to_tensor(PARTS).to(gl.uint32) << shift) - 1
        hist = hists.index(level)
        down = (high - keys).to(gl.uint32, bitcast=True)
        at = gl.where(down <= span, (down >> shift).to(gl.int32), aside)
        hist.atomic_scatter_add(gl.full([COLUMNS], 1, gl.int32, K), at, 0)
        upto = gl.associative_scan(hist.slice(0, PARTS).load(EVERY), 0, add)
        before = upto < need  # whether a bin and all before it have less
        bin = gl.sum(before.to(gl.int32), 0)
        if bin == PARTS:  # all of them are chosen, and some of what is below them
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
def bin_with(counts, k, LAYOUT: gl.constexpr):
    """The bin of at most 128 that has the k-th, which of its own that is, from 1 on, and how many it has."""
    gl.static_assert(counts.shape[0] <= 128, "7 bits of a word")
    left = (k - 1 - gl.associative_scan(counts, 0, add) + counts).to(gl.uint32)  # a large number where there are fewer
    counts = counts.to(gl.uint32)
    word = (gl.arange(0, counts.shape[0], layout=LAYOUT).to(gl.uint32) << 25) | (left << 14) | counts
    word = gl.max(gl.where(left < counts, word, 0), 0)
    return (word >> 25).to(gl.int32), (word >> 14 & 0x7FF).to(gl.int32) + 1, (word & 0x3FFF).to(gl.int32)


@gluon.jit
def bin_of_kth(hist, k, C: gl.constexpr):
    """`bin_with` of all bins: a warp adds up its part of them, then all find the part, and the bin in it."""
    WARPS: gl.constexpr = C.WARPS
    PART: gl.constexpr = C.BINS // WARPS
    EACH: gl.constexpr = gl.BlockedLayout([1, PART // 32], [1, 32], [WARPS, 1], [1, 0])
    OF_WARPS: gl.constexpr = in_every_warp(WARPS, WARPS)
    OF_PART: gl.constexpr = in_every_warp(PART, WARPS)
    sums = gl.allocate_shared_memory(gl.int32, [WARPS], FLAT)
    parts = hist.reinterpret(gl.int32, [WARPS, PART], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums.store(gl.sum(parts.load(EACH), 1))
    part, k, _ = bin_with(sums.load(OF_WARPS), k, OF_WARPS)
    bins = hist.reinterpret(gl.int32, [WARPS, PART], FLAT).index(part)
    bin, need, count = bin_with(bins.load(OF_PART), k, OF_PART)
    return part * PART + bin, need, count


@gluon.jit
def range_of(x, C: gl.constexpr):
    """The greatest and the least number of a row, and those of what bins divide.

    Where a few elements are far from all others, the latter are the least of the greatest of warps and the greatest of
    their least. What is outside is in the first bin or in the last.
    """
    WARPS: gl.constexpr = C.WARPS
    ENDS: gl.constexpr = in_every_warp(WARPS, WARPS)
    ends = gl.allocate_shared_memory(gl.int32, [2, WARPS], FLAT)
    high = order_key(gl.max(gl.max(x, 3), 1))
    low = gl.min(gl.min(x, 3), 1)
    ends.index(0).store(gl.max(high, 1))
    ends.index(1).store(gl.min(gl.where(low == low, order_key(low), KEY_OF_INF), 1))
    highs, lows = ends.index(0).load(ENDS), ends.index(1).load(ENDS)
    greatest, least = value_of(gl.max(highs, 0)), value_of(gl.min(lows, 0))
    high, low = value_of(gl.min(highs, 0)), value_of(gl.max(lows, 0))
    outliers = (high > low) & (greatest - least > 2 * (high - low))
    high, low = gl.where(outliers, high, greatest), gl.where(outliers, low, least)
    # All warps may have −inf, of what is left out.
    return greatest, least, high, gl.where(low == float("-inf"), -gl.abs(high), low)


@gluon.jit
def first_of(tied, need, counts, C: gl.constexpr):
    """1 for the first `need` of what is tied, and how many there are."""
    place, total = places_of(tied, gl.zeros([C.WARPS], gl.int32, gl.SliceLayout(1, lanes(C.WARPS))), counts, C)
    return gl.where((tied != 0) & (place <= need), 1, 0), total


@gluon.jit
def chosen_of(x, first, offset, k, length, counts, C: gl.constexpr):
    """1 for the elements [WARPS, TILES, 32, 4] of a row that are among its k largest."""
    WARPS: gl.constexpr = C.WARPS
    TILES: gl.constexpr = C.TILES
    BINS: gl.constexpr = C.BINS
    X: gl.constexpr = elements(WARPS, TILES)
    COLUMNS: gl.constexpr = 128 * TILES * WARPS
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    hist = gl.allocate_shared_memory(gl.int32, [BINS], FLAT)
    pairs = gl.allocate_shared_memory(gl.int64, [LIST], FLAT)
    listed = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    best = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT)
    hist.store(gl.zeros([BINS], gl.int32, LINE))
    listed.store(gl.zeros([1], gl.int32, LINE))
    for each in gl.static_range(2):
        best.index(each).store(gl.full([1], -0x7FFFFFFF - 1, gl.int32, LINE))
    greatest, least, high, low = range_of(x, C)
    chosen = gl.zeros([WARPS, TILES, 32, 4], gl.int32, X)
    left = k  # to be chosen by another way
    if greatest == least:  # one value, and NaN
        chosen, total = first_of((x == greatest).to(gl.int32), k, counts, C)
        left = gl.where(total >= k, 0, k)
    else:
        scale = (BINS - 2.0) / (high - low)
        y = gl.minimum((high - x) * scale + WHOLE, WHOLE + BINS - 1.0)  # NaN is in the last bin
        at = gl.maximum(y, WHOLE).to(gl.int32, bitcast=True) - BITS_OF_WHOLE
        flat = gl.reshape(at, [COLUMNS])
        hist.atomic_scatter_add(gl.full([COLUMNS], 1, gl.int32, flat.type.layout), flat, 0)
        bin, need, count = bin_of_kth(hist, k, C)
        if (count <= LIST) & (bin < BINS - 1):
            none = gl.zeros([WARPS, TILES, 32, 4], gl.int32, X)  # has the layout
            of_thread = first + gl.zeros([WARPS, 1, 32, 1], gl.int32, X)
            gl.inline_asm(
                append_ptx, ("r", "r", "r", "r", "r", "r"),
                [pairs, listed, bin, of_thread, at + none, x.to(gl.int32, bitcast=True) + none], [], is_pure=False,
            )  # fmt: skip
            gl.barrier()
            if count <= SHORT_LIST:
                kth_of_list(pairs, count, need, best, SHORT_LIST, WARPS)
            else:
                kth_of_list(pairs, count, need, best, LIST, WARPS)
            gl.barrier()
            threshold = value_of(gl.max(best.index(0).load(LINE), 0))
            chosen = flags_of(x, threshold, offset, gl.max(best.index(1).load(LINE), 0) - first)
            left = gl.to_tensor(0)
    if left > 0:
        keys = order_key(x)
        least_key, high_key, need, whole = interval_of_kth(gl.reshape(keys, [WARPS, 128 * TILES]), k, length, C)
        chosen = (keys >= least_key).to(gl.int32)
        if whole == 0:  # of equal ones the first by column
            tied, _ = first_of((keys == high_key).to(gl.int32), need, counts, C)
            chosen = (keys > high_key).to(gl.int32) + tied
    return chosen


@gluon.jit
def choose_in_cta(row_ptr, length, k, out, slots, table_row, width, C: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Write the columns of the k largest of a row's elements, more than k and no more than the threads hold.

    With a PAGE_SIZE their slots too; returns whether that was done: if all of them have a page.
    """
    counts = gl.allocate_shared_memory(gl.int32, [C.WARPS], FLAT)
    first, tile, one = columns_of(C.WARPS, C.TILES)
    x = load_row(row_ptr, first + tile + one, length, C.UNIT)
    first = hidden(first)
    if PAGE_SIZE:
        pages = page_of(first + tile, table_row, width, length, PAGE_SIZE)
    chosen = chosen_of(x, first, tile + one, k, length, counts, C)
    marks = gl.zeros([C.WARPS], gl.int32, gl.SliceLayout(1, lanes(C.WARPS)))
    if PAGE_SIZE:
        unmapped = gl.max(gl.max(((chosen != 0) & (pages < 0)).to(gl.int32), 3), 1)
        marks = gl.convert_layout(gl.max(unmapped, 1), marks.type.layout, assert_trivial=True)
    place, total = places_of(chosen, marks, counts, C)
    column = hidden(first) + tile + one
    gl.store(out + (place - 1), column, mask=chosen != 0)
    if PAGE_SIZE:
        gl.store(slots + (place - 1), pages * PAGE_SIZE + column % PAGE_SIZE, mask=chosen != 0)
    return total >> 20 == 0
