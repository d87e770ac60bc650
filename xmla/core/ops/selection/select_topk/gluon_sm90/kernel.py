"""Exact top-k of many rows in one launch for Hopper: a row's candidates stay in the shared memory of its program.

As in the portable kernels (kernels.py beside this folder) a sample of the row gives a bound that a few more than k of
its elements reach, and one read of the row keeps these. Here each warp appends what it finds in its part of a tile to
one list of the program: it reserves places by one atomic addition, so that no warp waits for another. The list is in no
order. The k-th largest is found among it by histograms of order keys. Those chosen are marked by a bit a column, of
those that equal the k-th the first alone, and the count of the bits before it is an index's place.

    sample → bound
    tile i in registers ─→ elements above it ─→ pairs[], total      (no barrier; tile i + 1 is on its way)
    k ≤ total ≤ CAPACITY ── yes → entries are the pairs    ┐→ histograms → the k-th → bits of columns → indices
                         └─ no  → entries are the row's own┘

The last step serves both, so that a row whose sample misleads, or that has too few numbers beside its NaN, is read some
four times and selected as exactly. Where fewer than k are above the bound and enough equal it, as in a row of one
value, the k-th is the bound: the row is read again up to the last of these and of those above. What atomic additions
decide, the order of the list, no result depends on.
"""

from xmla.core.lang.gluon import add, gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.selection.select_topk.pairs import KEY_OF_INF, KEY_OF_MINUS_INF
from xmla.core.ops.selection.select_topk.sample import SLACK_PART

WARPS = gl.constexpr(8)
TILE = gl.constexpr(4096)  # columns: 16 of each thread
CHUNK = gl.constexpr(2048)  # entries that are looked at together
BINS = gl.constexpr(2048)  # of a histogram
OCTAVES = gl.constexpr(4 << 23)  # keys of four octaves, where the sample's search begins
SAMPLED = gl.constexpr(32)  # adjacent elements of a sample

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))  # vectors, an element a lane
FOURS = gl.constexpr(gl.BlockedLayout([4], [32], [WARPS.value], [0]))  # four adjacent elements a lane
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def parts(count):
    """Registers of a vector [count] of which a thread has one part."""
    return gl.BlockedLayout([count // (32 * WARPS.value)], [32], [WARPS.value], [0])


@gluon.constexpr_function
def append_ptx(outputs, inputs):
    """PTX by which a warp appends to a list the values above a bound, each with its column.

    Its operands are the addresses of the list's pairs and of its length, the most pairs, the bound, and a thread's
    columns and values. A length beyond the most tells that pairs are missing.
    """
    (pairs,), (length,), (most,), (bound,), columns, values = inputs
    lines = [".reg .pred keep, more, leave, leader;", ".reg .b32 bits, own, upto, other, total, place, lane;"]
    # Which are kept as bits of a word: 16 predicates would be moved to registers and back.
    lines += ["mov.u32 bits, 0;"]
    for i, value in enumerate(values):
        lines += [f"setp.gt.f32 keep, {value}, {bound};", f"@keep or.b32 bits, bits, {1 << i};"]
    lines += ["popc.b32 own, bits;", "mov.u32 upto, own;"]
    for distance in (1, 2, 4, 8, 16):
        lines += [f"shfl.sync.up.b32 other|more, upto, {distance}, 0, 0xffffffff;", "@more add.u32 upto, upto, other;"]
    lines += [
        "shfl.sync.idx.b32 total, upto, 31, 31, 0xffffffff;",
        "setp.eq.u32 leave, total, 0;",
        "@leave bra done;",
        "mov.u32 lane, %laneid;",
        "setp.eq.u32 leader, lane, 0;",
        "mov.u32 place, 0;",
        f"@leader atom.shared.add.u32 place, [{length}], total;",
        "shfl.sync.idx.b32 place, place, 0, 31, 0xffffffff;",
        "add.u32 total, place, total;",
        f"setp.gt.u32 leave, total, {most};",
        "@leave bra done;",
        "sub.u32 own, upto, own;",
        "add.u32 place, place, own;",
        f"mad.lo.u32 place, place, 8, {pairs};",
    ]
    for i, (column, value) in enumerate(zip(columns, values, strict=True)):
        lines += [
            f"and.b32 other, bits, {1 << i};",
            "setp.ne.u32 keep, other, 0;",
            f"@keep st.shared.v2.b32 [place], {{{column}, {value}}};",
            "@keep add.u32 place, place, 8;",
        ]
    return "\n".join(["{", *lines, "done:", "}"])


@gluon.jit
def order_key(x):
    """float32 → uint32 in the same order; −0 equals +0, NaN is 1, below −inf."""
    bits = gl.where(x == 0.0, 0.0, x).to(gl.uint32, bitcast=True)
    key = gl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return gl.where(x == x, key, 1)


@gluon.jit
def row_range(starts_ptr, ends_ptr, row, num_columns, HAS_STARTS: gl.constexpr):
    """A row's first column and its number of columns, both within the row."""
    start = 0
    if HAS_STARTS:
        start = gl.minimum(gl.maximum(gl.load(starts_ptr + row), 0), num_columns)
    # Clamped before the subtraction: −2**31 − start would wrap to a large length.
    end = gl.maximum(gl.minimum(gl.load(ends_ptr + row), num_columns), start)
    return start, end - start


@gluon.jit
def step_of(span):
    """The shift by which `span` keys fall into at most BINS bins."""
    zeros = gl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [span - 1], dtype=gl.int32, is_pure=True, pack=1)
    return gl.maximum(32 - zeros - 11, 0).to(gl.uint32)


@gluon.jit
def clear(memory):
    memory.store(gl.zeros([memory.shape[0]], memory.dtype, parts(memory.shape[0])))


@gluon.jit
def count_bins(histogram, offset, span, shift):
    """Count offsets below `span` by bins, the greatest first; the first one takes also those of bins beyond."""
    bin = BINS - 1 - gl.minimum(offset >> shift, BINS - 1).to(gl.int32)
    histogram.atomic_scatter_add(gl.full([offset.shape[0]], 1, gl.int32, LINE), bin, 0, offset < span)


@gluon.jit
def bin_of_kth(counts, k, slack):
    """The bin of the k-th entry, the number of those before that bin, whether there are more than k + slack up to its
    end, and whether there are k at all.

    `counts` are of bins, the greatest first.
    """
    upto = gl.associative_scan(counts, 0, add)
    before = upto - counts
    bin = BINS - 1 - gl.arange(0, BINS, layout=parts(BINS))
    word = bin << 20 | before << 2 | gl.where(upto > k + slack, 3, 1)
    word = gl.max(gl.where((before < k) & (upto >= k), word, 0), 0)
    return (word >> 20).to(gl.uint32), word >> 2 & 0x3FFFF, word & 2, word & 1


@gluon.jit
def bound_of_sample(row_ptr, length, rank, C: gl.constexpr):
    """The order key of a value that a few more than rank · STEP of the row's elements reach, and of one that few do.

    If its sample is representative: it is about the rank-th largest of the maxima of LANES lanes, onto which SAMPLED of
    every SAMPLED · STEP elements are folded. Their place rotates, so that data with a period is not sampled in one
    phase only.
    """
    LANES: gl.constexpr = C.LANES
    STEP: gl.constexpr = C.STEP
    FOLD: gl.constexpr = LANES // SAMPLED  # pieces of a fold
    lane = gl.arange(0, LANES, layout=LINE)
    piece = lane // SAMPLED
    offs = (piece * STEP + piece * 5 % STEP) * SAMPLED + lane % SAMPLED
    maxima = gl.full([LANES], float("-inf"), gl.float32, LINE)  # NaN never becomes a maximum
    pieces = length // (SAMPLED * STEP)
    for first in range(0, pieces, 2 * FOLD):
        ptrs = row_ptr + first * (SAMPLED * STEP) + offs
        x = gl.load(ptrs, mask=first + piece < pieces, other=float("-inf"))
        y = gl.load(ptrs + LANES * STEP, mask=first + FOLD + piece < pieces, other=float("-inf"))
        maxima = gl.maximum(maxima, gl.maximum(x.to(gl.float32), y.to(gl.float32)))
    keys = order_key(maxima)
    highest = gl.max(keys, 0)
    low = gl.where(highest > KEY_OF_MINUS_INF + OCTAVES, highest - OCTAVES + 1, KEY_OF_MINUS_INF)
    span = highest - low + 1
    above = highest + 1
    one = gl.full([], 1, gl.uint32)
    more = gl.to_tensor(1)
    histogram = gl.allocate_shared_memory(gl.int32, [BINS], FLAT)
    while (span > 1) & (more > 0):
        shift = step_of(span)
        clear(histogram)
        count_bins(histogram, keys - low, span, shift)
        counts = histogram.load(parts(BINS))
        bin, before, more, reached = bin_of_kth(counts, rank, rank // SLACK_PART)
        if (above > highest) & (reached > 0):
            half, _, _, _ = bin_of_kth(counts, rank // 2, 0)
            above = gl.minimum(low + (half + 1 << shift), highest)
        # If too few are so near to the greatest: all of them, once.
        rank -= before
        more = gl.where(reached > 0, more, 1)
        span = gl.where(reached > 0, gl.minimum(span - (bin << shift), one << shift), highest + 1 - KEY_OF_MINUS_INF)
        low = gl.where(reached > 0, low + (bin << shift), KEY_OF_MINUS_INF)
    return low, gl.maximum(above, low + 1)


@gluon.jit
def value_of(key):
    bits = gl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def append(pairs, length, bound, column, x, CAPACITY: gl.constexpr):
    """Append elements of a tile above `bound`, with their columns."""
    gl.inline_asm(
        append_ptx, ("r", "r", "r", "f", "r", "f"), [pairs, length, CAPACITY, bound, column, x.to(gl.float32)], [],
        is_pure=False,
    )  # fmt: skip


@gluon.jit
def keep_candidates(logits_ptr, offset, length, bound, pairs, total, C: gl.constexpr):
    """Append the elements of a row above `bound`; `offset` is that of its first one in logits."""
    CAPACITY: gl.constexpr = C.CAPACITY
    lane = gl.arange(0, TILE, layout=FOURS)
    head = 0
    if C.ALIGNED:
        head = 3 - ((offset + 3) & 3).to(gl.int32)
        tile_ptr = logits_ptr + (offset + head) // 4 * 4  # so that the compiler knows the multiple
        head = gl.minimum(head, length)
    else:
        tile_ptr = logits_ptr + offset
    whole = (length - head) // TILE
    even = gl.load(tile_ptr + lane, mask=whole > 0)
    odd = gl.load(tile_ptr + TILE + lane, mask=whole > 1)
    # Two tiles in turns: of one that follows another its registers would be copied.
    for tile in range(0, whole, 2):
        append(pairs, total, bound, head + tile * TILE + lane, even, CAPACITY)
        if tile + 2 < whole:
            even = gl.load(tile_ptr + (tile + 2) * TILE + lane)
        if tile + 1 < whole:
            append(pairs, total, bound, head + (tile + 1) * TILE + lane, odd, CAPACITY)
        if tile + 3 < whole:
            odd = gl.load(tile_ptr + (tile + 3) * TILE + lane)
    # What is left, the elements before the first tile at its end.
    left = length - whole * TILE
    for first in range(0, left, TILE):
        place = first + gl.arange(0, TILE, layout=LINE)
        column = head + whole * TILE + place
        column = gl.where(column >= length, column - length, column)
        x = gl.load(logits_ptr + offset + column, mask=place < left, other=float("nan"))
        append(pairs, total, bound, column, x, CAPACITY)


@gluon.jit
def entries_of_row(row_ptr, first, length):
    """Order keys and columns of CHUNK elements of a row from the `first` on; keys of absent ones are 0."""
    column = first + gl.arange(0, CHUNK, layout=LINE)
    there = column < length
    x = gl.load(row_ptr + column, mask=there, other=0.0).to(gl.float32)
    return gl.where(there, order_key(x), 0), column


@gluon.jit
def keys_of(pairs, count):
    """Order keys of a row's candidates; those of absent ones are 0."""
    key = order_key((pairs.load(LINE) >> 32).to(gl.int32).to(gl.float32, bitcast=True))
    return gl.where(gl.arange(0, pairs.shape[0], layout=LINE) < count, key, 0)


@gluon.jit
def columns_of(pairs):
    return (pairs.load(LINE) & 0xFFFFFFFF).to(gl.int32)


@gluon.jit
def kth_of(k, low, guess, held, row_ptr, length, histogram, IN_ROW: gl.constexpr):
    """The least key of the k largest entries, whether more than these reach it, and if so how many equal to it count.

    Keys of entries, of which k reach `low`, are `held`, or those of the whole row. The k-th is presumably within
    [low, low + guess).
    """
    one = gl.full([], 1, gl.uint32)
    more = gl.to_tensor(1)
    span = KEY_OF_INF + 1 - low
    while (span > 1) & (more > 0):
        shift = step_of(guess)
        clear(histogram)
        if IN_ROW:
            for first in range(0, length, CHUNK):
                key, _ = entries_of_row(row_ptr, first, length)
                count_bins(histogram, key - low, span, shift)
        else:
            count_bins(histogram, held - low, span, shift)
        bin, before, more, _ = bin_of_kth(histogram.load(parts(BINS)), k, 0)
        k -= before
        rest = span - (bin << shift)
        span = gl.where(bin == BINS - 1, rest, gl.minimum(rest, one << shift))
        guess = span
        low += bin << shift
    return low, more, k


@gluon.jit
def bit_of(column):
    return gl.full([column.shape[0]], 1, gl.int32, LINE) << (column & 31)


@gluon.jit
def bits_of(word):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def mark(words, least, most, held, pairs):
    """Set the bits of the columns of pairs whose keys are within [least, most], and no other."""
    clear(words)
    column = columns_of(pairs)
    words.atomic_scatter_or(bit_of(column), column >> 5, 0, (held >= least) & (held <= most))


@gluon.jit
def mark_row(words, others, least, count, kth, ties, row_ptr, length):
    """Set the bits of the columns of a row's `count` elements that reach `least`, and in `others` of as many that equal
    `kth` as hold the first `ties`; return a column behind them.
    """
    clear(words)
    clear(others)
    first = gl.to_tensor(0)
    while (first < length) & ((count > 0) | (ties > 0)):
        key, column = entries_of_row(row_ptr, first, length)
        reach, equal = key >= least, (key == kth) & (ties > 0)
        words.atomic_scatter_or(bit_of(column), column >> 5, 0, reach)
        others.atomic_scatter_or(bit_of(column), column >> 5, 0, equal)
        found = gl.sum(reach.to(gl.int32) | (equal.to(gl.int32) << 16), 0)
        count -= found & 0xFFFF
        ties -= found >> 16
        first += CHUNK
    return gl.minimum(first, length)


@gluon.jit
def lacks_equal(kth, count, row_ptr, length):
    """Whether fewer than `count` of a row's elements equal `kth`."""
    first = gl.to_tensor(0)
    while (first < length) & (count > 0):
        key, _ = entries_of_row(row_ptr, first, length)
        count -= gl.sum((key == kth).to(gl.int32), 0)
        first += CHUNK
    return count > 0


@gluon.jit
def add_first(words, others, count):
    """Set also the first `count` bits of `others`."""
    word = others.load(parts(others.shape[0]))
    bits = bits_of(word)
    left = count - (gl.associative_scan(bits, 0, add) - bits)
    one = gl.full([word.shape[0]], 1, gl.int32, parts(word.shape[0]))
    place = one - 1  # below which a word has no more than are left
    for i in gl.static_range(5):
        further = place + (16 >> i)
        place = gl.where(bits_of(word & ((one << further) - 1)) <= left, further, place)
    first = gl.where(bits <= left, word, word & ((one << place) - 1))
    words.store(words.load(parts(words.shape[0])) | first)


@gluon.jit
def store_marked(out, there, column, words, places):
    """Store columns that are there and whose bits are set, each at the number of bits before its own."""
    at = gl.where(there, column >> 5, 0)
    word = words.gather(at, 0)
    place = places.gather(at, 0) + bits_of(word & (bit_of(column) - 1))
    gl.store(out + place, column, mask=there & (word & bit_of(column) != 0))


@gluon.jit
def choose(k, count, low, above, held, pairs, row_ptr, length, out, IN_ROW: gl.constexpr, C: gl.constexpr):
    """Write the columns of the k largest entries: the pairs, whose keys are `held`, or all elements of the row.

    `count` of them are above the key `low`, and that of the k-th is presumably below `above`.
    """
    # What is allocated here shares its memory with what was before, and `words` with `histogram`.
    histogram = gl.allocate_shared_memory(gl.int32, [BINS], FLAT)
    # Of a row with many ties, the first of those that equal the bound.
    kth, more, ties = low, gl.to_tensor(2), k - count
    if not IN_ROW:
        kth, more, ties = kth_of(k, low, above - low, held, row_ptr, length, histogram, False)
    elif (count >= k) | lacks_equal(low, k - count, row_ptr, length):
        if count < k:  # NaN too
            low, above = gl.full([], 1, gl.uint32), gl.full([], KEY_OF_INF + 1, gl.uint32)
        kth, more, ties = kth_of(k, low, above - low, held, row_ptr, length, histogram, True)
    words = gl.allocate_shared_memory(gl.int32, [C.WORDS], FLAT)
    places = gl.allocate_shared_memory(gl.int32, [C.WORDS], FLAT)
    least = gl.where(more > 0, kth + 1, kth)
    ties = gl.where(more > 0, ties, 0)
    if IN_ROW:
        length = mark_row(words, places, least, k - ties, kth, ties, row_ptr, length)
    else:
        mark(words, least, KEY_OF_INF, held, pairs)
    if more > 0:  # of entries that equal the k-th, the first by column
        if not IN_ROW:
            mark(places, kth, kth, held, pairs)
        add_first(words, places, ties)
    counts = bits_of(words.load(parts(words.shape[0])))
    places.store(gl.associative_scan(counts, 0, add) - counts)
    if IN_ROW:
        for first in range(0, length, CHUNK):
            column = first + gl.arange(0, CHUNK, layout=LINE)
            store_marked(out, column < length, column, words, places)
    else:
        store_marked(out, held > 0, columns_of(pairs), words, places)


@gluon.jit
def select_row(
    logits_ptr, starts_ptr, ends_ptr, first_row, num_columns, row_stride, k, sample_rank, indices_ptr, C: gl.constexpr
):  # fmt: skip
    """Select this program's row; parameters as in the kernel below."""
    CAPACITY: gl.constexpr = C.CAPACITY
    gl.static_assert(32 * C.WORDS < 1 << 18, "a row's entries are counted in 18 bits")
    row = gl.program_id(0).to(gl.int64)
    start, length = row_range(starts_ptr, ends_ptr, first_row + row, num_columns, C.HAS_STARTS)
    out = indices_ptr + offset_of(first_row + row, k)
    if length <= k:
        for base in range(0, k, CHUNK):
            column = base + gl.arange(0, CHUNK, layout=LINE)
            gl.store(out + column, gl.where(column < length, column, -1), mask=column < k)
    else:
        pairs = gl.allocate_shared_memory(gl.int64, [CAPACITY], FLAT)
        total = gl.allocate_shared_memory(gl.int32, [1], FLAT)
        offset = offset_of(row, row_stride) + start
        row_ptr = logits_ptr + offset
        total.store(gl.zeros([1], gl.int32, LINE))
        low, above = gl.full([], KEY_OF_MINUS_INF, gl.uint32), gl.full([], KEY_OF_INF + 1, gl.uint32)
        if length > CAPACITY:
            low, above = bound_of_sample(row_ptr, length, sample_rank, C)
        gl.barrier()
        keep_candidates(logits_ptr, offset, length, value_of(low), pairs, total, C)
        gl.barrier()
        count = gl.max(total.load(LINE), 0)
        if (count >= k) & (count <= CAPACITY):
            choose(k, count, low, above, keys_of(pairs, count), pairs, row_ptr, length, out, False, C)
        else:
            choose(k, count, low, above, low, pairs, row_ptr, length, out, True, C)


@gluon.jit
def topk_rows_sm90_kernel(
    logits_ptr,  # [T, N] f32 | bf16
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    first_row,  # of those of logits
    num_columns,
    row_stride,
    k,
    sample_rank,
    indices_ptr,  # [T, K] i32
    C: gl.constexpr,  # Rows
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    select_row(logits_ptr, starts_ptr, ends_ptr, first_row, num_columns, row_stride, k, sample_rank, indices_ptr, C)
