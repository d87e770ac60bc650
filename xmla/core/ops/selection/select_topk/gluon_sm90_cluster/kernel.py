"""Exact top-k of rows in one launch for Hopper: a row is in the registers of a cluster of 8 CTAs, or of one CTA.

One program of this kernel is a cluster: an array of shared memory is divided among its CTAs by `cga_layout`, and a load
in another division reads other CTAs' parts, once all have met at a barrier of the cluster. A row is read once:

    tile t of CTA c: columns (8 t + c) · WIDTH on, in registers
    each thread: the greatest ─→ each CTA: a quantile of these ─→ bottoms[c] ─┐ the least of them: k elements reach it,
    ── all read bottoms ──────────────────────────────────────────────────────┘ or the search starts again from all keys
    interval [bottom, greatest] of the k-th ─→ histogram of 256 bins ─→ each CTA adds those of all ─→ the bin of the
      k-th, which is the next interval: until all of it are chosen, or it is one key (at most five, two as a rule)
    a bit a column ─→ counts[tile] ─→ the number of chosen columns before each ─→ indices, by column

Short rows are selected by one CTA in another way (cta.py).

What is equal to the k-th is chosen by column, so no result depends on the order of atomic additions, and no row takes
much longer than another: NaN, of which all have one key, is like any other value.
"""

from xmla.core.lang.gluon import add, cluster, gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.selection.select_topk.gluon_sm90.kernel import bits_of, row_range
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.cta import choose_in_cta, hidden
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.keys import (
    KEY_OF_INF,
    KEY_OF_NAN,
    leading_zeros,
    order_key,
    page_of,
    shift_of,
)

CLUSTER = gl.constexpr(8)  # CTAs; more are not portable
WARPS = gl.constexpr(8)  # of a CTA
THREADS = gl.constexpr(32 * 8)
WIDTH = gl.constexpr(4 * 32 * 8)  # columns of a tile of a CTA
FEWEST_TILES = gl.constexpr(2)  # of a CTA
MOST = gl.constexpr(2048)  # k: threads, of which each has about one of the k largest
# Bins of an interval, so few that each CTA reads those of all, a bin a thread: sums of 2048 bins, which CTAs exchanged,
# took a barrier more.
BITS = gl.constexpr(8)
BINS = gl.constexpr(1 << 8)
LEVELS = gl.constexpr(5)  # intervals that end at single keys: one that may have fewer than k, and four of all keys


@gluon.constexpr_function
def in_cluster(size, warps, ctas):
    """Registers of a tensor of which each CTA has a part along the first axis."""
    rank = len(size)
    lanes = [1] * (rank - 1) + [32]
    return gl.BlockedLayout(size, lanes, warps, list(range(rank))[::-1], cga_layout=divided(rank, ctas))


@gluon.constexpr_function
def divided(rank, ctas):
    return [[step] + [0] * (rank - 1) for step in (1, 2, 4) if step < ctas]


@gluon.constexpr_function
def parts_of(tiles):
    """Parts of four columns of a word of bits."""
    return min(tiles, 8)


@gluon.constexpr_function
def layout_of_words(tiles, ctas):
    """Words [CTAS, TILES, …] of a bit for each column; a thread has `tiles // parts_of(tiles)` of them."""
    parts = parts_of(tiles)
    return in_cluster([1, tiles // parts, 1], [1, parts, WARPS.value // parts], ctas)


@gluon.constexpr_function
def of_one_page(C):
    """Adjacent columns that are mapped by one page: four of a thread, or those of a word."""
    return 4 if C.BINS else 4 * parts_of(C.TILES)


@gluon.constexpr_function
def in_each(size, ctas, warps=WARPS.value):
    """Registers of a vector that each CTA has whole."""
    return gl.BlockedLayout([size], [32], [warps], [0], cga_layout=[[0] for _ in divided(1, ctas)])


@gluon.constexpr_function
def every(bins, ctas):
    """Registers of bins [CTAS, BINS] of all CTAs, which each of them has whole: a thread those of its bins."""
    size, none = [ctas, bins // THREADS.value], [[0, 0] for _ in divided(2, ctas)]
    return gl.BlockedLayout(size, [1, 32], [1, WARPS.value], [1, 0], cga_layout=none)


@gluon.constexpr_function
def elements(ctas):
    return in_cluster([1, 1, 4], [1, 1, WARPS.value], ctas)


@gluon.constexpr_function
def rows(size, ctas):
    return in_cluster([1, size], [1, WARPS.value], ctas)


@gluon.constexpr_function
def part(ctas):
    """Shared memory of rows, one of each CTA."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=divided(2, ctas))


@gluon.constexpr_function
def flat(ctas):
    """Shared memory of a vector that is divided among CTAs."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=divided(1, ctas))


@gluon.constexpr_function
def fence_ptx(outputs, inputs):
    """PTX by which what a thread has written to its CTA's shared memory is there for the cluster, once all meet."""
    return "fence.release.sync_restrict::shared::cta.cluster;"


@gluon.jit
def meet():
    """A barrier of the cluster, for shared memory alone: one for all memory waits for the whole GPU's."""
    gl.inline_asm(fence_ptx, (), [], [], is_pure=False)
    cluster.barrier(relaxed=True)


@gluon.jit
def between(x, AXIS: gl.constexpr):
    """A vector as a tensor of three axes, of which it is one."""
    for axis in gl.static_range(3):
        if axis != AXIS:
            x = gl.expand_dims(x, axis)
    return x


@gluon.jit
def places(size: gl.constexpr, AXIS: gl.constexpr, LAYOUT: gl.constexpr):
    """The numbers of a tensor's places along one of its three axes."""
    if AXIS == 0:
        part: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    elif AXIS == 1:
        part: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    else:
        part: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    return between(gl.arange(0, size, layout=part), AXIS)


@gluon.jit
def along_last(size: gl.constexpr, LAYOUT: gl.constexpr):
    """The numbers of a tensor's places along the last of its four axes."""
    x = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2)


@gluon.jit
def find(counts, k, LAYOUT: gl.constexpr):
    """The bin of the k-th, the number in bins before it, and whether it ends with the k-th, in one word; 0 if there are
    fewer than k.
    """
    upto = gl.associative_scan(counts, 0, add)
    before = upto - counts
    bin = gl.arange(0, counts.shape[0], layout=LAYOUT)
    word = (1 << 24) | (bin << 12) | (before << 1) | (upto == k).to(gl.int32)
    return gl.max(gl.where((upto >= k) & (before < k), word, 0), 0)


@gluon.jit
def load_row(row_ptr, length, TILES: gl.constexpr, UNIT: gl.constexpr, CTAS: gl.constexpr):
    """Elements [CTAS, TILES, WIDTH]; absent columns are NaN, after all that are there."""
    X3: gl.constexpr = elements(CTAS)
    tile = places(TILES, 1, X3) * CTAS + places(CTAS, 0, X3)
    column = tile * WIDTH + places(WIDTH, 2, X3)
    if UNIT >= 4:
        # A mask of four columns alike makes one load of them; the last ones, of less than four, are loaded behind it.
        four = tile * WIDTH + places(WIDTH, 2, X3) // 4 * 4
        x = gl.load(row_ptr + column, mask=four + 4 <= length, other=float("nan")).to(gl.float32)
        if length % 4 != 0:
            last = gl.load(row_ptr + column, mask=(four + 4 > length) & (column < length), other=float("nan"))
            x = gl.where(four + 4 <= length, x, last.to(gl.float32))
    else:
        x = gl.load(row_ptr + column, mask=column < length, other=float("nan")).to(gl.float32)
    return x


@gluon.jit
def ends_of_cta(x, TILES: gl.constexpr, CTAS: gl.constexpr):
    """An order key that presumably k of a row's reach, as each CTA sees it, and the greatest of the CTA.

    A thread has one of 2048 parts of a row, whose greatest is about the k-th, or exceeds it. Of values in no order the
    least of these in a warp is below the k-th, but for one warp in a million, and the greatest of the CTA's warps near.
    """
    top = gl.max(gl.max(gl.reshape(x, [CTAS, TILES, WARPS, 32, 4]), 4), 1)
    keys = order_key(top)  # [CTAS, WARPS, 32]
    low = gl.min(gl.where(top > float("-inf"), keys, KEY_OF_INF), 2)  # lanes without a number do not count
    return gl.max(gl.where(low < KEY_OF_INF, low, KEY_OF_NAN), 1), gl.max(gl.max(keys, 2), 1)


@gluon.jit
def words_of(TILES: gl.constexpr, CTAS: gl.constexpr):
    """The first columns [CTAS, TILES, …] of words, of a bit for each of adjacent columns."""
    PARTS: gl.constexpr = parts_of(TILES)
    LAYOUT: gl.constexpr = layout_of_words(TILES, CTAS)
    tile = places(TILES, 1, LAYOUT) * CTAS + places(CTAS, 0, LAYOUT)
    return tile * WIDTH + places(THREADS // PARTS, 2, LAYOUT) * (4 * PARTS)


@gluon.jit
def load_pages(table_row, width, length, TILES: gl.constexpr, PAGE_SIZE: gl.constexpr, CTAS: gl.constexpr):
    """The page of each word's columns."""
    first = words_of(TILES, CTAS)
    return page_of(first, table_row, width, length, PAGE_SIZE)


@gluon.jit
def choose(
    row_ptr, length, k, out, slots, table_row, width, TILES: gl.constexpr, UNIT: gl.constexpr,
    PAGE_SIZE: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """Write the columns of the k largest of a row's elements, more than k and no more than the tiles hold.

    With a PAGE_SIZE their slots too; returns whether that was done: if all words with a chosen column have a page.
    """
    x = load_row(row_ptr, length, TILES, UNIT, CTAS)  # on its way while memory is cleared
    pages = gl.full([], -1, gl.int32)
    if PAGE_SIZE:
        pages = load_pages(table_row, width, length, TILES, PAGE_SIZE, CTAS)
    # What is outside of an interval is counted aside, by each lane: without a branch for each element.
    hists = gl.allocate_shared_memory(gl.int32, [LEVELS, CTAS, 2 * BINS], part(CTAS))
    bottoms = gl.allocate_shared_memory(gl.int32, [CTAS], flat(CTAS))
    tops = gl.allocate_shared_memory(gl.int32, [CTAS], flat(CTAS))
    counts = gl.allocate_shared_memory(gl.int32, [CTAS * TILES], flat(CTAS))
    for level in gl.static_range(LEVELS):
        hists.index(level).store(gl.zeros([CTAS, 2 * BINS], gl.int32, rows(2 * BINS // THREADS, CTAS)))
    bottom, top = ends_of_cta(x, TILES, CTAS)
    bottoms.store(bottom)
    tops.store(top)
    meet()
    high = gl.max(tops.load(in_each(1, CTAS)), 0)
    low = gl.min(bottoms.load(in_each(1, CTAS)), 0)

    # The interval [high − span, high] of the k-th is narrowed until all of it are chosen, or it is one key.
    x = gl.reshape(x, [CTAS, TILES * WIDTH])
    X: gl.constexpr = x.type.layout
    # The bits of positive numbers are in order; what is not above 0, or NaN, is below them.
    keys = gl.maximum(x, float("-inf")).to(gl.int32, bitcast=True) if low > 0 else order_key(x)
    one = gl.full([CTAS, TILES * WIDTH], 1, gl.int32, X)
    lane = gl.expand_dims(gl.arange(0, TILES * WIDTH, layout=gl.SliceLayout(0, X)) // 4 % 32, 0)
    aside = (BINS + lane + gl.zeros([CTAS, TILES * WIDTH], gl.int32, X)).to(gl.uint32)
    shift = shift_of((high - low).to(gl.uint32, bitcast=True), BITS)
    span = (gl.to_tensor(BINS).to(gl.uint32) << shift) - 1
    need = k  # of those in the interval
    level = 0
    while level < LEVELS:
        hist = hists.index(level)
        # What is beyond the bins is counted aside, by each lane: without a branch for each element.
        bin = gl.minimum((high - keys).to(gl.uint32, bitcast=True) >> shift, aside)
        hist.atomic_scatter_add(one, bin.to(gl.int32), 1)
        meet()
        word = find(bins_of_all(hist, CTAS), need, in_each(BINS // THREADS, CTAS))
        if word == 0:  # fewer than k reach the least: from all keys on
            again = load_row(row_ptr, hidden(length), TILES, UNIT, CTAS)  # masks are not kept in registers
            keys = order_key(gl.reshape(again, [CTAS, TILES * WIDTH]))
            shift = shift_of((high - KEY_OF_NAN).to(gl.uint32, bitcast=True), BITS)
            level += 1
        else:
            high -= ((word >> 12 & 0xFF).to(gl.uint32) << shift).to(gl.int32, bitcast=True)
            need -= (word >> 1) & 0x7FF
            span = (gl.to_tensor(1).to(gl.uint32) << shift) - 1
            level = gl.where((shift == 0) | (word & 1 == 1), LEVELS, level + 1)
            shift = gl.maximum(shift.to(gl.int32) - BITS, 0).to(gl.uint32)
    least = high - gl.minimum(span, (high - KEY_OF_NAN).to(gl.uint32, bitcast=True)).to(gl.int32, bitcast=True)
    flags = gl.where(keys > high, 1, gl.where(keys >= least, 1 << 16, 0))
    return write(flags, need, out, slots, pages, counts, (hists, bottoms, tops), TILES, PAGE_SIZE, CTAS)


@gluon.jit
def bins_of_all(hist, CTAS: gl.constexpr):
    """The sums of all CTAs' bins, a thread those of its own."""
    counts = gl.sum(hist.slice(0, BINS, dim=1).load(every(BINS, CTAS)), 0)
    return gl.convert_layout(counts, in_each(BINS // THREADS, CTAS), assert_trivial=True)


@gluon.jit
def write(
    flags, need, out, slots, pages, counts, read, TILES: gl.constexpr, PAGE_SIZE: gl.constexpr, CTAS: gl.constexpr
):  # fmt: skip
    """Write the columns of what is over an interval, and of the first `need` in it; with a PAGE_SIZE their slots too.

    Other CTAs may not have ended to read what was `read` before: nothing may take its place until all have met again.
    """
    PARTS: gl.constexpr = parts_of(TILES)
    WORDS: gl.constexpr = THREADS // PARTS
    HELD: gl.constexpr = TILES // PARTS  # words of a thread
    # A bit a column, then words of adjacent columns.
    flags = gl.reshape(flags, [CTAS, TILES, THREADS, 4])
    bits = gl.sum(flags << along_last(4, flags.type.layout), 3)
    bits = (bits | (bits >> 12)).to(gl.uint8)  # [CTAS, TILES, THREADS]
    W3: gl.constexpr = in_cluster([1, HELD, PARTS], [1, PARTS, WARPS // PARTS], CTAS)
    bits = gl.reshape(gl.convert_layout(bits, W3), [CTAS, TILES, WORDS, PARTS]).to(gl.uint32)
    part = along_last(PARTS, bits.type.layout).to(gl.uint32) * 4
    B3: gl.constexpr = layout_of_words(TILES, CTAS)
    over_bits = gl.convert_layout(gl.sum((bits & 15) << part, 3), B3, assert_trivial=True)
    tied_bits = gl.convert_layout(gl.sum((bits >> 4) << part, 3), B3, assert_trivial=True)

    # How many there are before each word: in its tile, and in the tiles of all CTAs before that.
    many = bits_of(over_bits) | (bits_of(tied_bits) << 12)
    upto = gl.associative_scan(many, 2, add)
    both = over_bits | tied_bits
    posted = gl.sum(many, 2) | (gl.max(bits_of(both), 2) << 24)
    if PAGE_SIZE:
        posted |= gl.max(((both != 0) & (pages < 0)).to(gl.int32), 2) << 30
    counts.store(gl.reshape(posted, [CTAS * TILES]))
    meet()
    for each in gl.static_range(3):
        read[each]._keep_alive()
    P3: gl.constexpr = in_cluster([1, HELD, max(1, CTAS * TILES // 32)], [1, PARTS, WARPS // PARTS], CTAS)
    POSTED: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, P3))
    posted = counts.load(POSTED)
    place = gl.arange(0, CTAS * TILES, layout=POSTED)
    order = between(place % TILES * CTAS + place // TILES, 2)
    earlier = order < places(TILES, 1, P3) * CTAS + places(CTAS, 0, P3)
    of_tiles = gl.where(earlier, between(posted, 2), 0)
    over_before = gl.sum(of_tiles & 0xFFF, 2)
    tied_before = gl.sum((of_tiles >> 12) & 0xFFF, 2)
    over_before = gl.expand_dims(gl.convert_layout(over_before, gl.SliceLayout(2, B3)), 2) + ((upto - many) & 0xFFF)
    tied_before = gl.expand_dims(gl.convert_layout(tied_before, gl.SliceLayout(2, B3)), 2) + ((upto - many) >> 12)

    first = words_of(TILES, CTAS)
    place = over_before + gl.minimum(tied_before, need)
    left = need - tied_before
    for _ in range(gl.max((posted >> 24) & 0x3F, 0)):  # words have no more bits
        rest = both & (both - 1)
        lowest = both ^ rest
        equal = (tied_bits & lowest) != 0
        chosen = (lowest != 0) & ((left > 0) | ((over_bits & lowest) != 0))
        column = first + 31 - leading_zeros(lowest)
        gl.store(out + place, column, mask=chosen)
        if PAGE_SIZE:  # a word's columns lie on one page
            gl.store(slots + place, pages * PAGE_SIZE + column % PAGE_SIZE, mask=chosen)
        place += chosen.to(gl.int32)
        left -= equal.to(gl.int32)
        both = rest
    counts._keep_alive()
    return gl.max(posted >> 30, 0) == 0


@gluon.jit
def select_row(
    logits_ptr, row_stride, k, start, length, first_row, indices_ptr, slots_ptr, table_row, width, C: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Write the k largest of the row of this program, a cluster; parameters as in the kernel below.

    With a PAGE_SIZE also their slots, by the row's pages, `table_row` [width]; returns whether that was done.
    """
    TILES: gl.constexpr = C.TILES
    CTAS: gl.constexpr = C.CTAS
    if C.BINS == 0:
        gl.static_assert(C.WARPS == WARPS, "tiles are of so many warps")
        gl.static_assert(TILES >= FEWEST_TILES and (TILES <= 8 or TILES == 16), "words are of 8 tiles")
    gl.static_assert(PAGE_SIZE % of_one_page(C) == 0, "adjacent columns lie on one page")
    row = gl.program_id(0).to(gl.int64)
    out = indices_ptr + offset_of(first_row + row, k)
    slots = slots_ptr + offset_of(row, k)
    mapped = length > k
    if length <= k:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [C.WARPS], [0], cga_layout=divided(1, CTAS))
        for base in range(0, k, CTAS * 32 * C.WARPS):
            column = base + gl.arange(0, CTAS * 32 * C.WARPS, layout=LINE)
            gl.store(out + column, gl.where(column < length, column, -1), mask=column < k)
    else:
        row_ptr = logits_ptr + offset_of(row, row_stride // C.UNIT * C.UNIT) + start
        if C.BINS:
            mapped = choose_in_cta(row_ptr, length, k, out, slots, table_row, width, C, PAGE_SIZE)
        elif length <= CTAS * WIDTH * (TILES // 4) and TILES // 4 >= FEWEST_TILES:
            mapped = choose(row_ptr, length, k, out, slots, table_row, width, TILES // 4, C.UNIT, PAGE_SIZE, CTAS)
        else:
            mapped = choose(row_ptr, length, k, out, slots, table_row, width, TILES, C.UNIT, PAGE_SIZE, CTAS)
    return mapped


@gluon.jit
def row_range_in_turn(starts_ptr, ends_ptr, first_row, num_columns, C: gl.constexpr):
    """The range of this program's row, once launches before have ended; it is known by then, unless PATIENT."""
    if C.PATIENT:
        wait_for_earlier(C.OVERLAP_LIMIT)
    start, length = row_range(starts_ptr, ends_ptr, first_row + gl.program_id(0), num_columns, C.HAS_STARTS)
    if not C.PATIENT:
        wait_for_earlier(C.OVERLAP_LIMIT)
    return start, length


@gluon.jit
def topk_cluster_sm90_kernel(
    logits_ptr,  # [T, N] f32 | bf16
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    first_row,  # of those of logits
    num_columns,
    row_stride,
    k,
    indices_ptr,  # [T, K] i32
    C: gl.constexpr,  # Cluster
):
    let_next_start(C.OVERLAP_LIMIT)
    start, length = row_range_in_turn(starts_ptr, ends_ptr, first_row, num_columns, C)
    select_row(
        logits_ptr, row_stride, k, start, length, first_row, indices_ptr, indices_ptr, indices_ptr, 0, C, PAGE_SIZE=0
    )  # fmt: skip
