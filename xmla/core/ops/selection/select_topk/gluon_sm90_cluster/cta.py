"""Exact top-k of short rows in one launch for Hopper: a row is in the registers of one CTA.

    columns 128 · (TILES · w + t) on of warp w, tile t ─→ each thread's greatest ─→ two quantiles of the row
    BINS equal parts of what is between them ─→ histogram ─→ the bin of the k-th ── all of it are chosen ──────────┐
    what is in that bin ─→ a list ─→ the rank of each: the k-th and its column ────────────────────────────────────┤
    chosen columns before each, in its warp and in the warps before ─→ shared memory ─→ indices, by column ←───────┘

A bin is found from a float by a product and an addition, which keep the order, so that elements of a bin before
another's are greater, whatever is rounded. What is beyond the quantiles is in the first bin or in the last, so that any
two are right. Between them a bin has one or two elements, of any distribution that is smooth there.
Of a row where it has more than a list takes, the k-th is found among that bin's order keys, as an interval that is
narrowed. What is equal to the k-th is chosen by column, so no result depends on the order of atomic additions. NaN, of
which all have one key, is like any other value.
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
LEVELS = gl.constexpr(4)  # intervals that end at single keys
WHOLE = gl.constexpr(float(1 << 23))  # what is added to this is rounded to an integer, in the last bits
BITS_OF_WHOLE = gl.constexpr(0x4B000000)
LIST = gl.constexpr(64)  # elements of a bin that are ranked beside each other
SHORT_LIST = gl.constexpr(32)
MOST_OF_CTA = gl.constexpr(2048)  # k
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
    lines = [".reg .pred there, any;", ".reg .b32 place, column, count;", "mov.u32 count, 0;", "mov.u32 place, 0;"]
    # Most threads have none; one that has some takes their places at once, since ptxas branches around additions.
    lines += [f"setp.eq.u32 any, {bins[0]}, {bin};", *(f"setp.eq.or.u32 any, {each}, {bin}, any;" for each in bins[1:])]
    lines += ["@!any bra done;"]
    for each in bins:
        lines += [f"setp.eq.u32 there, {each}, {bin};", "@there add.u32 count, count, 1;"]
    lines += [f"atom.shared.add.u32 place, [{length}], count;", f"mad.lo.u32 place, place, 8, {pairs};"]
    for i, (each, value) in enumerate(zip(bins, values, strict=True)):
        lines += [
            f"setp.eq.u32 there, {each}, {bin};",
            f"add.u32 column, {first}, {i // 4 * 128 + i % 4};",
            "@there st.shared.v2.b32 [place], {column, " + value + "};",
            "@there add.u32 place, place, 8;",
        ]
    return "\n".join(["{", *lines, "done:", "}"])


@gluon.constexpr_function
def store_ptx(outputs, inputs):
    """PTX by which the thread that has a word other than 0 stores it."""
    (place,), words = inputs
    lines = [".reg .pred there;"]
    for word in words:
        lines += [f"setp.ne.u32 there, {word}, 0;", f"@there st.shared.b32 [{place}], {word};"]
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def scatter_ptx(outputs, inputs):
    """PTX by which each thread stores the values that have a flag to their places."""
    (memory,), flags, places, values = inputs
    lines = [".reg .pred there;", ".reg .b32 place;"]
    for flag, place, value in zip(flags, places, values, strict=True):
        lines += [
            f"setp.ne.u32 there, {flag}, 0;",
            f"mad.lo.u32 place, {place}, 4, {memory};",
            f"@there st.shared.b32 [place], {value};",
        ]
    return "\n".join(["{", *lines, "}"])


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
    """How many of a row's flags [WARPS, TILES, 32, 4] are before each that is one; how many there are, and 2**16 for
    each of the warps' marks.
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
    of_warp = sum_of_bytes(low, none + 0x01010101, marks << 16)
    if TILES > 4:
        high = gl.sum((own >> 32).to(gl.uint32), 1)
        of_warp = sum_of_bytes(high, none + 0x01010101, of_warp)
    counts.store(of_warp)
    of_warps = counts.load(gl.SliceLayout(0, P))
    other = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, P)), 0)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, P)), 1)
    base = gl.sum(gl.where(other < warp, gl.expand_dims(of_warps, 0), 0), 1)  # [WARPS]
    base = (base & 0xFFFF) - 1
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
def interval_of_kth(keys, high, low, need, C: gl.constexpr):
    """The least and the greatest key of a part of the interval [low, high], of which the k-th is the `need`-th, and
    whether all of it are among the k largest.

    If not, it is one key.
    """
    WARPS: gl.constexpr = C.WARPS
    COLUMNS: gl.constexpr = 128 * C.TILES * WARPS
    EVERY: gl.constexpr = in_every_warp(PARTS, WARPS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    hists = gl.allocate_shared_memory(gl.int32, [LEVELS, 2 * PARTS], FLAT)
    for level in gl.static_range(LEVELS):
        hists.index(level).store(gl.zeros([2 * PARTS], gl.int32, LINE))
    keys = gl.reshape(keys, [COLUMNS])
    K: gl.constexpr = keys.type.layout
    # What is outside of the interval is counted too, by each lane aside: without a branch for each element.
    aside = (PARTS + gl.arange(0, COLUMNS, layout=K) // 4 % 32).to(gl.uint32)
    span = (high - low).to(gl.uint32, bitcast=True)
    shift = shift_of(span, BITS)
    level = 0
    whole = gl.to_tensor(0)
    more = gl.to_tensor(1)
    while more > 0:
        hist = hists.index(level)
        down = (high - keys).to(gl.uint32, bitcast=True)
        at = gl.where(down <= span, down >> shift, aside)
        hist.atomic_scatter_add(gl.full([COLUMNS], 1, gl.int32, K), at.to(gl.int32), 0)
        upto = gl.associative_scan(hist.slice(0, PARTS).load(EVERY), 0, add)
        before = upto < need  # whether a bin and all before it have less
        whole = (gl.min(gl.where(before, COLUMNS, upto), 0) == need).to(gl.int32)
        need -= gl.max(gl.where(before, upto, 0), 0)
        start = gl.sum(before.to(gl.int32), 0).to(gl.uint32) << shift
        high -= start.to(gl.int32, bitcast=True)
        span = gl.minimum(span - start, (gl.to_tensor(1).to(gl.uint32) << shift) - 1)
        more = gl.where((whole == 0) & (shift > 0), 1, 0)
        shift = gl.maximum(shift.to(gl.int32) - BITS, 0).to(gl.uint32)
        level += 1
    return high - span.to(gl.int32, bitcast=True), high, whole


@gluon.jit
def bin_of_kth(hist, k, C: gl.constexpr):
    """The bin that has the k-th, which of its own that is, from 1 on, and how many it has, at most 255."""
    WARPS: gl.constexpr = C.WARPS
    PART: gl.constexpr = C.BINS // WARPS
    EACH: gl.constexpr = gl.BlockedLayout([1, PART // 32], [1, 32], [WARPS, 1], [1, 0])
    WARP: gl.constexpr = gl.SliceLayout(1, EACH)
    sums = gl.allocate_shared_memory(gl.int32, [WARPS], FLAT)
    found = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    counts = hist.reinterpret(gl.int32, [WARPS, PART], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).load(EACH)
    sums.store(gl.sum(counts, 1))
    before = gl.associative_scan(counts, 1, add) - counts  # in the warp's part
    warp = gl.arange(0, WARPS, layout=WARP)
    P: gl.constexpr = lanes(WARPS)
    other = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, P)), 0)
    earlier = other < gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, P)), 1)
    base = gl.sum(gl.where(earlier, gl.expand_dims(sums.load(gl.SliceLayout(0, P)), 0), 0), 1)
    base = gl.convert_layout(base, WARP, assert_trivial=True)
    left = (k - 1 - gl.expand_dims(base, 1) - before).to(gl.uint32)  # a large number where it is before
    bin = gl.expand_dims(warp * PART, 1) + gl.expand_dims(gl.arange(0, PART, layout=gl.SliceLayout(0, EACH)), 0)
    counts = counts.to(gl.uint32)
    word = (bin.to(gl.uint32) << 20) | (left + 1 << 8) | gl.minimum(counts, 255)
    word = gl.where(left < counts, word, 0) + gl.zeros([WARPS, PART], gl.uint32, EACH)  # has the layout
    gl.inline_asm(store_ptx, ("r", "r"), [found, word], [], is_pure=False)
    gl.barrier()
    word = gl.max(found.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    return word >> 20, (word >> 8) & 0xFFF, word & 255


@gluon.jit
def bracket_of(x, tile, k, length, C: gl.constexpr):
    """A number that presumably exceeds the k-th of a row, and one that does not reach it.

    Each thread has the greatest of some elements. The least of these in a warp is a quantile of the row, of any
    distribution: of 16 elements the upper 21 %, of 8 the upper 38 %, of 4 the upper 62 %, within some 10 %. Of those of
    all warps the greatest and the least are taken; where k asks for more, the ends of the row.
    """
    WARPS: gl.constexpr = C.WARPS
    ENDS: gl.constexpr = in_every_warp(WARPS, WARPS)
    ends = gl.allocate_shared_memory(gl.int32, [2, WARPS], FLAT)
    top = gl.max(gl.max(x, 3), 1)  # [WARPS, 32]
    if length >= 3.5 * k:
        part = gl.max(gl.max(gl.where(tile < 2, x, float("-inf")), 3), 1)
    elif length >= 1.9375 * k:
        part = gl.max(gl.max(gl.where(tile < 1, x, float("-inf")), 3), 1)
    else:
        part = gl.min(gl.min(x, 3), 1)
    # Lanes that have no number, or −inf alone, do not count.
    low = gl.min(gl.where(part > float("-inf"), order_key(part), KEY_OF_INF), 1)
    least = gl.min(gl.where(top > float("-inf"), order_key(top), KEY_OF_INF), 1)
    high = gl.where(4.25 * k >= length, least, gl.max(order_key(top), 1))
    ends.index(0).store(high)
    ends.index(1).store(low)
    highs, lows = ends.index(0).load(ENDS), ends.index(1).load(ENDS)
    high = gl.max(gl.where(highs < KEY_OF_INF, highs, KEY_OF_NAN), 0)
    return value_of(high), value_of(gl.min(lows, 0))


@gluon.jit
def range_of(x, C: gl.constexpr):
    """The greatest and the least order key of the numbers in x."""
    WARPS: gl.constexpr = C.WARPS
    ENDS: gl.constexpr = in_every_warp(WARPS, WARPS)
    ends = gl.allocate_shared_memory(gl.int32, [2, WARPS], FLAT)
    high, low = gl.max(gl.max(x, 3), 1), gl.min(gl.min(x, 3), 1)
    ends.index(0).store(gl.max(order_key(high), 1))
    ends.index(1).store(gl.min(gl.where(low == low, order_key(low), KEY_OF_INF), 1))
    return gl.max(ends.index(0).load(ENDS), 0), gl.min(ends.index(1).load(ENDS), 0)


@gluon.jit
def in_warps(x, C: gl.constexpr):
    """A number of each warp, in the registers of `places_of`'s marks."""
    return gl.convert_layout(x, gl.SliceLayout(1, lanes(C.WARPS)), assert_trivial=True)


@gluon.jit
def kth_by_column(over, tied, k, counts, C: gl.constexpr):
    """1 for what is over and for the first of what is tied, k together; whether that is so, with one that is tied."""
    place, total = places_of(tied, in_warps(gl.sum(gl.sum(gl.sum(over, 3), 1), 1), C), counts, C)
    need = k - (total >> 16)
    enough = (need > 0) & (need <= (total & 0xFFFF))
    return over + gl.where((tied != 0) & (place < need), 1, 0), enough.to(gl.int32)


@gluon.jit
def bins_of(x, high, low, k, hist, C: gl.constexpr):
    """The bins of a row's elements [WARPS, TILES, 32, 4], equal parts of a range, and `bin_of_kth`.

    What is outside of the range is in the first bin or the last, NaN in the last.
    """
    BINS: gl.constexpr = C.BINS
    COLUMNS: gl.constexpr = 128 * C.TILES * C.WARPS
    nothing = gl.zeros([C.WARPS, C.TILES, 32, 4], gl.float32, elements(C.WARPS, C.TILES))
    scale = (BINS - 2.0) / (high - low)
    y = gl.fma(x, nothing - scale, nothing + (high * scale + WHOLE))
    y = gl.maximum(gl.minimum(y, WHOLE + BINS - 1.0), WHOLE)
    at = y.to(gl.int32, bitcast=True) - BITS_OF_WHOLE
    flat = gl.reshape(at, [COLUMNS])
    hist.atomic_scatter_add(gl.full([COLUMNS], 1, gl.int32, flat.type.layout), flat, 0)
    bin, need, count = bin_of_kth(hist, k, C)
    return at, bin, need, count


@gluon.jit
def chosen_of(x, first, tile, one, k, length, hist, listed, best, counts, C: gl.constexpr):
    """1 for the elements [WARPS, TILES, 32, 4] of a row that are among its k largest."""
    WARPS: gl.constexpr = C.WARPS
    TILES: gl.constexpr = C.TILES
    BINS: gl.constexpr = C.BINS
    X: gl.constexpr = elements(WARPS, TILES)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pairs = gl.allocate_shared_memory(gl.int64, [LIST], FLAT)
    none = gl.zeros([WARPS, TILES, 32, 4], gl.int32, X)  # has the layout
    high, low = bracket_of(x, tile, k, length, C)
    at, bin, need, count = none, gl.to_tensor(0), k, gl.to_tensor(LIST + 1)
    binned = high > low
    if binned:
        at, bin, need, count = bins_of(x, high, low, k, hist, C)
    few = (count <= LIST) & (bin < BINS - 1)  # NaN, of which the last may have some, is no threshold
    if few & (need == count):  # all of the bin
        chosen = (at <= bin).to(gl.int32)
    elif few:
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
        chosen = flags_of(x, threshold, tile + one, gl.max(best.index(1).load(LINE), 0) - first)
    else:
        chosen = none
        left = gl.to_tensor(True)
        if high == low:  # of many that are equal
            chosen, enough = kth_by_column((x > high).to(gl.int32), (x == high).to(gl.int32), k, counts, C)
            left = enough == 0
        if left:
            high_key, low_key = range_of(gl.where(at == bin, x, float("nan")), C)
            low_key = gl.where(binned & (bin < BINS - 1), low_key, KEY_OF_NAN)
            keys = order_key(x)
            low_key, high_key, whole = interval_of_kth(keys, high_key, low_key, need, C)
            chosen = (keys >= low_key).to(gl.int32)
            if whole == 0:  # of equal ones the first by column
                over, tied = (keys > high_key).to(gl.int32), (keys == high_key).to(gl.int32)
                chosen, enough = kth_by_column(over, tied, k, counts, C)
    return chosen


@gluon.jit
def write_in_order(out, chosen, place, x, k, C: gl.constexpr):
    """Write the chosen of x by way of shared memory, so that a warp's stores are adjacent."""
    THREADS: gl.constexpr = 32 * C.WARPS
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [C.WARPS], [0])
    staged = gl.allocate_shared_memory(gl.int32, [MOST_OF_CTA], FLAT)
    none = gl.zeros([C.WARPS, C.TILES, 32, 4], gl.int32, elements(C.WARPS, C.TILES))  # has the layout
    gl.inline_asm(
        scatter_ptx, ("r", "r", "r", "r"), [staged, chosen + none, place + none, x + none], [], is_pure=False
    )  # fmt: skip
    gl.barrier()
    for base in gl.static_range(0, MOST_OF_CTA, THREADS):
        at = base + gl.arange(0, THREADS, layout=LINE)
        gl.store(out + at, staged.slice(base, THREADS).load(LINE), mask=at < k)


@gluon.jit
def choose_in_cta(row_ptr, length, k, out, slots, table_row, width, C: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Write the columns of the k largest of a row's elements, more than k and no more than the threads hold.

    With a PAGE_SIZE their slots too; returns whether that was done: if all of them have a page.
    """
    WARPS: gl.constexpr = C.WARPS
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    counts = gl.allocate_shared_memory(gl.int32, [WARPS], FLAT)
    hist = gl.allocate_shared_memory(gl.int32, [C.BINS], FLAT)
    listed = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    best = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT)
    hist.store(gl.zeros([C.BINS], gl.int32, LINE))
    listed.store(gl.zeros([1], gl.int32, LINE))
    for each in gl.static_range(2):
        best.index(each).store(gl.full([1], -0x7FFFFFFF - 1, gl.int32, LINE))
    first, tile, one = columns_of(WARPS, C.TILES)
    x = load_row(row_ptr, first + tile + one, length, C.UNIT)
    first = hidden(first)
    if PAGE_SIZE:
        pages = page_of(first + tile, table_row, width, length, PAGE_SIZE)
    chosen = chosen_of(x, first, tile, one, k, length, hist, listed, best, counts, C)
    marks = gl.zeros([WARPS], gl.int32, gl.SliceLayout(1, lanes(WARPS)))
    if PAGE_SIZE:
        unmapped = gl.max(gl.max(((chosen != 0) & (pages < 0)).to(gl.int32), 3), 1)
        marks = in_warps(gl.max(unmapped, 1), C)
    place, total = places_of(chosen, marks, counts, C)
    column = hidden(first) + tile + one
    write_in_order(out, chosen, place, column, k, C)
    if PAGE_SIZE:
        write_in_order(slots, chosen, place, pages * PAGE_SIZE + column % PAGE_SIZE, k, C)
    return total >> 16 == 0
