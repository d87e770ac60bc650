"""Logits over fp8 pages of a multiple of 64 keys on sm_100, in Gluon: products by tcgen05 into tensor memory.

Work is divided among CTAs as in the portable kernel: the tiles of all groups' keys form a list, of which a CTA has a
run. Four partitions pass the run's tiles on, tile t by way of stage t % STAGES and of accumulator t % 2:
- `copy`, four warps, finds the groups of the run, and copies each one's queries and tiles of keys.
- `multiply`, one warp, starts the product of a tile, [KEYS, ROWS].
- `weigh`, four warps for even tiles and four for odd ones, sums over each token's heads, and stores logits. A thread
  has a key, so that a sum stays within it.
Of a tile t, an arrow from who arrives at a barrier to who waits for it:

    copy                     multiply                              weigh
    t → full[stage] ───────► product → dots_full[t % 2] ─────────► sums over heads, times the keys' scales
             └───────────────────────────────────────────────────►
    t + STAGES ◄──────────── → empty[stage] ◄───────────────────── → empty[stage]
                             product of t + 2 ◄─────────────────── → dots_empty[t % 2]

Queries have two places. Those of a group follow when all tiles of the group before the last one are free again; its
first tile's barrier tells of them.
"""

from typing import Any, NamedTuple

# By name its functions would outlive the module, and at exit nanobind would tell of leaks.
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from xmla.core.lang.gluon import add, async_copy, gl, gluon
from xmla.core.lang.indexer import log2_of
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.kernel import KEYS, SMEM_V, WORDS, chunks, swizzled
from xmla.core.ops.indexer.indexer_logits_paged.gluon_sm90.kernel import HALF, count_tiles

STAGES = gl.constexpr(8)  # tiles of keys in shared memory
ACCUMULATORS = gl.constexpr(2)
PIECE = gl.constexpr(32)  # columns of a product that are loaded at once
QUERIES = gl.constexpr(2)
MAX_ROWS = gl.constexpr(256)  # columns of a product: two of them fill tensor memory
# Registers per thread of the odd tiles' sums, of the warp that multiplies, and of those that copy.
WEIGH_REGISTERS, MULTIPLY_REGISTERS, COPY_REGISTERS = gl.constexpr(160), gl.constexpr(72), gl.constexpr(104)
FIRST_KEY, PLACES, QUERY_PLACE, FIRST_TOKEN = (gl.constexpr(i) for i in range(4))  # words that tell of a tile
RECORD = gl.constexpr(4)
QUADS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # of words that are copied by 16 bytes


class Shared(NamedTuple):
    """Shared and tensor memory and mbarriers."""

    q: Any  # [QUERIES, ROWS, D] e4m3
    weights: Any  # [QUERIES, ROWS] f32, halves
    ends: Any  # [QUERIES, GROUP] i32: each token's keys
    keys: Any  # [STAGES, KEYS, D] e4m3
    scales: Any  # [STAGES, KEYS] f32
    records: Any  # [STAGES, RECORD] i32
    dots: Any  # tensor memory [ACCUMULATORS, KEYS, ROWS] f32
    full: Any  # [STAGES]
    empty: Any  # [STAGES]
    dots_full: Any  # [ACCUMULATORS]
    dots_empty: Any  # [ACCUMULATORS]


class Call(NamedTuple):
    """Arguments of the call."""

    q8: Any  # [T, I, D] e4m3
    weights: Any  # [T, I] f32
    cache: Any  # P pages of R rows of values and R times 4 bytes of scales
    block_table: Any  # [B, M] i32
    lengths: Any  # [T] i32
    request_ids: Any  # [T] i32 if PAGES.HAS_REQUEST_IDS
    num_groups: Any
    num_requests: Any
    num_pages: Any
    table_stride: Any
    capacity: Any
    next_n: Any
    groups_a_request: Any


@gluon.constexpr_function
def registers(columns):
    """What four warps load of KEYS rows of tensor memory: a thread has a row."""
    lanes = [[1 << bit, 0] for bit in range(5)]
    of_columns = [[0, 1 << bit] for bit in range(columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(of_columns, lanes, [[32, 0], [64, 0]], [], [KEYS.value, columns])


@gluon.constexpr_function
def whole(warps):
    """Registers of a record, all of it in each thread of so many warps."""
    return gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0]] * (warps.bit_length() - 1), [], [RECORD.value])


@gluon.jit
def word_of(record, WORD: gl.constexpr):
    word = gl.arange(0, RECORD, layout=record.type.layout)
    return gl.sum(gl.where(word == WORD, record, 0), 0)


@gluon.jit
def copy_queries(call, shared, place, first_token, count, C: gl.constexpr):
    """Start the copy of the queries of `count` tokens, zeros in other rows; store halves of their weights, and ends."""
    HEADS: gl.constexpr = C.QUERY.HEADS
    BLOCK_I: gl.constexpr = C.QUERY.BLOCK_I
    ROWS: gl.constexpr = C.GROUP * BLOCK_I
    CHUNKS: gl.constexpr = chunks(C.QUERY.D)
    offs_d = gl.expand_dims(gl.arange(0, C.QUERY.D, layout=gl.SliceLayout(0, CHUNKS)), 0)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, CHUNKS))
    member, head = row // BLOCK_I, row % BLOCK_I
    q_row = offset_of(first_token + member, C.QUERY.Q_STRIDE_T) + offset_of(head, C.QUERY.Q_STRIDE_I, BLOCK_I)
    ok, ptrs = gl.broadcast(
        gl.expand_dims((member < count) & (head < HEADS), 1), call.q8 + gl.expand_dims(q_row, 1) + offs_d
    )
    async_copy.async_load(shared.q.index(place), ptrs, mask=ok)
    row = gl.arange(0, ROWS, layout=WORDS)
    member, head = row // BLOCK_I, row % BLOCK_I
    weight_ptrs = call.weights + offset_of(first_token + member, C.QUERY.WEIGHT_STRIDE) + head
    weights = gl.load(weight_ptrs, mask=(member < count) & (head < HEADS), other=0.0)
    shared.weights.index(place).store(weights * 0.5)
    member = gl.arange(0, C.GROUP, layout=WORDS)
    length = gl.load(call.lengths + first_token + member, mask=member < count, other=0)
    shared.ends.index(place).store(gl.minimum(length, call.capacity))


@gluon.jit
def load_page(table_row, key, last_page, known, PAGE_SIZE: gl.constexpr):
    """The page of a key, that of the last one for keys after it; −1 for an unknown request."""
    return gl.load(table_row + gl.minimum(key // PAGE_SIZE, last_page), mask=known, other=-1)


@gluon.jit
def copy_half(call, shared, stage, HALF_OF_TILE: gl.constexpr, page, key, C: gl.constexpr):
    """Start copies of half a tile, on one page, zeros if the page is missing; 1 if it is there.

    What follows the last key on its page is copied as well: it is not stored.
    """
    D: gl.constexpr = C.QUERY.D
    PAGE_SIZE: gl.constexpr = C.PAGES.PAGE_SIZE
    CHUNKS: gl.constexpr = chunks(D)
    there = (page >= 0) & (page < call.num_pages)
    count = gl.where(there, HALF, 0)
    entry = key % PAGE_SIZE
    values = call.cache + (offset_of(page, C.PAGES.PAGE_STRIDE) + offset_of(entry, D, PAGE_SIZE))
    values = values.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    row = gl.expand_dims(gl.arange(0, HALF, layout=gl.SliceLayout(1, CHUNKS)), 1)
    offs_d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, CHUNKS)), 0)
    mask, ptrs = gl.broadcast(row < count, values + (row * D + offs_d))
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16]), [1, 16])  # the plan demands it
    async_copy.async_load(shared.keys.index(stage).slice(HALF_OF_TILE * HALF, HALF), ptrs, mask=mask)
    scales = call.cache + (offset_of(page, C.PAGES.PAGE_STRIDE) + (PAGE_SIZE * D + offset_of(entry, 4, PAGE_SIZE)))
    row = gl.arange(0, HALF, layout=QUADS)
    ptrs = gl.max_contiguous(gl.multiple_of(scales.to(gl.pointer_type(gl.float32), bitcast=True) + row, [16]), [4])
    async_copy.async_load(shared.scales.index(stage).slice(HALF_OF_TILE * HALF, HALF), ptrs, mask=row < count)
    return there.to(gl.int32)


@gluon.jit
def wait_for_tiles(shared, free, end):
    """Wait until the tiles from `free` to before `end` are free again; the tiles that are."""
    for tile in range(free, end):
        mbarrier.wait(shared.empty.index(tile % STAGES), tile // STAGES & 1)
    return gl.maximum(free, end)


@gluon.jit
def copy(run_first, run_last, call, shared, C: gl.constexpr):
    GROUP: gl.constexpr = C.GROUP
    BLOCK_G: gl.constexpr = C.BLOCK_G
    PAGE_SIZE: gl.constexpr = C.PAGES.PAGE_SIZE
    offs_g = gl.arange(0, BLOCK_G, layout=WORDS)
    word = gl.arange(0, RECORD, layout=WORDS)
    passed = gl.to_tensor(0)
    tile = gl.to_tensor(0)  # of the run
    free = gl.to_tensor(0)  # tiles whose stages have been waited for
    last_begin = gl.to_tensor(0)  # the first tile of the group before
    place = gl.to_tensor(1)  # of the group's queries
    for base in range(0, call.num_groups, BLOCK_G):
        tiles = count_tiles(
            call.lengths, base + offs_g, call.num_groups, call.capacity, call.next_n, call.groups_a_request, GROUP
        )
        ends = passed + gl.associative_scan(tiles, 0, add)  # [BLOCK_G], positions in the list
        begins = ends - tiles
        first_group = gl.sum((ends <= run_first).to(gl.int32), 0)
        last_group = gl.sum((begins < run_last).to(gl.int32), 0)
        # From 0: Triton loses all alignment inside a loop that starts at the result of a reduction.
        for step in range(0, last_group - first_group):
            number = first_group + step
            begin = gl.sum(gl.where(offs_g == number, begins, 0), 0)
            end = gl.sum(gl.where(offs_g == number, ends, 0), 0)
            first_key = (gl.maximum(run_first, begin) - begin) * KEYS
            end_key = (gl.minimum(run_last, end) - begin) * KEYS

            group = base + number
            part = group % call.groups_a_request * GROUP  # the group's first token, of the request's
            count = gl.minimum(call.next_n - part, GROUP)
            request = group // call.groups_a_request
            first_token = request * call.next_n + part
            if C.PAGES.HAS_REQUEST_IDS:
                request = gl.load(call.request_ids + group)
            table_row = call.block_table + offset_of(request, call.table_stride)
            longest = gl.to_tensor(0)
            for i in gl.static_range(GROUP):
                if i < count:
                    longest = gl.maximum(longest, gl.load(call.lengths + first_token + i))
            longest = gl.minimum(longest, call.capacity)
            known = (request >= 0) & (request < call.num_requests) & (longest > 0)
            last_page = (longest - 1) // PAGE_SIZE

            if first_key < end_key:  # not of a group without keys amid others
                free = wait_for_tiles(shared, free, last_begin)
                last_begin = tile
                place = 1 - place
                copy_queries(call, shared, place, first_token, count, C)
            left = load_page(table_row, first_key, last_page, known, PAGE_SIZE)
            right = load_page(table_row, first_key + HALF, last_page, known, PAGE_SIZE)
            while first_key < end_key:
                stage = tile % STAGES
                free = wait_for_tiles(shared, free, tile - (STAGES - 1))
                there = copy_half(call, shared, stage, 0, left, first_key, C)
                there |= copy_half(call, shared, stage, 1, right, first_key + HALF, C) << 1
                async_copy.mbarrier_arrive(shared.full.index(stage), increment_count=False)
                # A tile's pages are loaded one tile before its keys are copied.
                left = load_page(table_row, first_key + KEYS, last_page, known, PAGE_SIZE)
                right = load_page(table_row, first_key + KEYS + HALF, last_page, known, PAGE_SIZE)
                record = gl.where(word == FIRST_KEY, first_key, gl.where(word == PLACES, there, 0))
                record += gl.where(word == QUERY_PLACE, place, gl.where(word == FIRST_TOKEN, first_token, 0))
                shared.records.index(stage).store(record)
                mbarrier.arrive(shared.full.index(stage), count=1)
                tile += 1
                first_key += KEYS
        passed += gl.sum(tiles, 0)


@gluon.jit
def multiply(tiles, shared):
    for tile in range(0, tiles):
        stage = tile % STAGES
        accumulator = tile % ACCUMULATORS
        mbarrier.wait(shared.full.index(stage), tile // STAGES & 1)
        fence_async_shared()
        place = word_of(shared.records.index(stage).load(whole(1)), QUERY_PLACE)
        mbarrier.arrive(shared.empty.index(stage), count=1)
        mbarrier.wait(shared.dots_empty.index(accumulator), (tile // ACCUMULATORS & 1) ^ 1)
        blackwell.tcgen05_mma(
            shared.keys.index(stage), shared.q.index(place).permute((1, 0)), shared.dots.index(accumulator),
            use_acc=False, mbarriers=[],
        )  # fmt: skip
        blackwell.tcgen05_commit(shared.dots_full.index(accumulator))


@gluon.jit
def by_head(x):
    """x [KEYS, TOKENS, HEADS] as HEADS tensors [KEYS, TOKENS, 1]."""
    KEYS: gl.constexpr = x.shape[0]
    TOKENS: gl.constexpr = x.shape[1]
    HEADS: gl.constexpr = x.shape[2]
    parts = (x,)
    for halving in gl.static_range(log2_of(HEADS)):
        smaller = ()
        for part in gl.static_range(2**halving):
            pairs = gl.reshape(parts[part], (KEYS, TOKENS, 2, HEADS >> (halving + 1)))
            smaller += gl.split(gl.permute(pairs, (0, 1, 3, 2)))
        parts = smaller
    return parts


@gluon.jit
def fma_pairs(a, b, c, d, low, high):
    """low + a · c and high + b · d, in one instruction."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b64 x, y, sum;
        mov.b64 x, {$2, $3};
        mov.b64 y, {$4, $5};
        mov.b64 sum, {$6, $7};
        fma.rn.f32x2 sum, x, y, sum;
        mov.b64 {$0, $1}, sum;
        }
        """,
        "=r,=r,r,r,r,r,r,r", [a, b, c, d, low, high], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def sum_heads(shared, accumulator, place, FIRST: gl.constexpr, TOKENS: gl.constexpr, BLOCK_I: gl.constexpr):
    """Σ relu(dots) · weight over each token's heads, [KEYS, TOKENS], of the columns of a product from FIRST on.

    2 · relu(x) is x + |x|, which keeps NaN; halving a weight is exact from 2**-125 on. Sums of even and of odd heads
    run beside each other.
    """
    COLUMNS: gl.constexpr = min(TOKENS * BLOCK_I, PIECE)
    HEADS: gl.constexpr = COLUMNS // TOKENS
    REGISTERS: gl.constexpr = registers(COLUMNS)
    for part in gl.static_range(TOKENS * BLOCK_I // COLUMNS):
        dots = shared.dots.index(accumulator).slice(FIRST + part * COLUMNS, COLUMNS).load(REGISTERS)
        halves = shared.weights.index(place).slice(FIRST + part * COLUMNS, COLUMNS).load(gl.SliceLayout(0, REGISTERS))
        halves, dots = gl.broadcast(gl.expand_dims(halves, 0), dots)
        twice = by_head(gl.reshape(dots + gl.abs(dots), (KEYS, TOKENS, HEADS)))
        halves = by_head(gl.reshape(halves, (KEYS, TOKENS, HEADS)))
        if part == 0:
            even, odd = gl.zeros_like(twice[0]), gl.zeros_like(twice[0])
        for i in gl.static_range(HEADS // 2):
            even, odd = fma_pairs(twice[2 * i], twice[2 * i + 1], halves[2 * i], halves[2 * i + 1], even, odd)
    return gl.reshape(even + odd, (KEYS, TOKENS))


@gluon.constexpr_function
def of_tokens(sums):
    return gl.SliceLayout(0, sums.type.layout)


@gluon.jit
def weigh(first, tiles, logits_ptr, max_len, shared, C: gl.constexpr):
    """Store the logits of every second tile from `first` on, whose products are in that accumulator."""
    BLOCK_I: gl.constexpr = C.QUERY.BLOCK_I
    TOKENS: gl.constexpr = max(min(C.GROUP, PIECE // BLOCK_I), 1)  # whose heads are summed at once
    for tile in range(first, tiles, ACCUMULATORS):
        stage = tile % STAGES
        mbarrier.wait(shared.full.index(stage), tile // STAGES & 1)
        record = shared.records.index(stage).load(whole(4))
        place = word_of(record, QUERY_PLACE)
        mbarrier.wait(shared.dots_full.index(first), tile // ACCUMULATORS & 1)
        sums, ends = (), ()
        for piece in gl.static_range(C.GROUP // TOKENS):
            sums += (sum_heads(shared, first, place, piece * TOKENS * BLOCK_I, TOKENS, BLOCK_I),)
            ends += (shared.ends.index(place).slice(piece * TOKENS, TOKENS).load(of_tokens(sums[piece])),)
        BY_KEY: gl.constexpr = gl.SliceLayout(1, sums[0].type.layout)
        scales = gl.expand_dims(shared.scales.index(stage).load(BY_KEY), 1)
        mbarrier.arrive(shared.dots_empty.index(first), count=1)
        mbarrier.arrive(shared.empty.index(stage), count=1)
        offs_n = gl.expand_dims(gl.arange(0, KEYS, layout=BY_KEY), 1)
        key = word_of(record, FIRST_KEY) + offs_n
        there = (word_of(record, PLACES) >> (offs_n // HALF)) & 1 != 0
        for piece in gl.static_range(C.GROUP // TOKENS):
            member = piece * TOKENS + gl.arange(0, TOKENS, layout=of_tokens(sums[piece]))
            row_ptrs = logits_ptr + gl.expand_dims(offset_of(word_of(record, FIRST_TOKEN) + member, max_len), 0)
            scores = gl.where(there, sums[piece] * scales, float("-inf"))
            gl.store(row_ptrs + key, scores, mask=key < gl.expand_dims(ends[piece], 0))


@gluon.jit
def indexer_logits_paged_sm100_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    request_ids_ptr,  # [T] i32 if PAGES.HAS_REQUEST_IDS
    num_groups,  # groups of up to GROUP adjacent tokens of one request
    num_requests,
    num_pages,
    max_len,
    table_stride,
    capacity,  # min(max_len, M · R)
    next_n,  # tokens per request; 1 with request ids
    groups_a_request,
    logits_ptr,  # [T, max_len] f32 | bf16
    C: gl.constexpr,  # BlackwellPagedLogits
):
    D: gl.constexpr = C.QUERY.D
    ROWS: gl.constexpr = C.GROUP * C.QUERY.BLOCK_I
    gl.static_assert(ROWS <= MAX_ROWS, "a product of sm_100 has MAX_ROWS columns at most")
    gl.static_assert(C.PAGES.PAGE_SIZE % HALF == 0, "half a tile of sm_100 is on one page")
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    # All groups' tiles of keys form a list, of which each CTA takes an equal run. The list follows from the lengths, so
    # each CTA finds its run without the others.
    total = gl.to_tensor(0)  # 32 bits: the logits of 2**31 tiles do not fit memory
    for base in range(0, num_groups, C.BLOCK_G):
        group = base + gl.arange(0, C.BLOCK_G, layout=WORDS)
        tiles = count_tiles(lengths_ptr, group, num_groups, capacity, next_n, groups_a_request, C.GROUP)
        total += gl.sum(tiles, 0)
    run_first = (total.to(gl.int64) * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    run_last = (total.to(gl.int64) * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)

    call = Call(
        q8=q8_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True), weights=weights_ptr,
        cache=cache_ptr.to(gl.pointer_type(gl.uint8), bitcast=True), block_table=block_table_ptr, lengths=lengths_ptr,
        request_ids=request_ids_ptr, num_groups=num_groups, num_requests=num_requests, num_pages=num_pages,
        table_stride=table_stride, capacity=capacity, next_n=next_n, groups_a_request=groups_a_request,
    )  # fmt: skip
    DOTS: gl.constexpr = blackwell.TensorMemoryLayout((KEYS, ROWS), 1)
    shared = Shared(
        q=gl.allocate_shared_memory(gl.float8e4nv, [QUERIES, ROWS, D], swizzled(D)),
        weights=gl.allocate_shared_memory(gl.float32, [QUERIES, ROWS], SMEM_V),
        ends=gl.allocate_shared_memory(gl.int32, [QUERIES, C.GROUP], SMEM_V),
        keys=gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, D], swizzled(D)),
        scales=gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], SMEM_V),
        records=gl.allocate_shared_memory(gl.int32, [STAGES, RECORD], SMEM_V),
        dots=blackwell.allocate_tensor_memory(gl.float32, [ACCUMULATORS, KEYS, ROWS], DOTS),
        full=mbarrier.allocate_mbarrier(batch=STAGES),
        empty=mbarrier.allocate_mbarrier(batch=STAGES),
        dots_full=mbarrier.allocate_mbarrier(batch=ACCUMULATORS),
        dots_empty=mbarrier.allocate_mbarrier(batch=ACCUMULATORS),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(stage), count=129)  # copies of 128 threads, and their stores
        mbarrier.init(shared.empty.index(stage), count=2)  # who multiplies, and who sums, after the product
    for accumulator in gl.static_range(ACCUMULATORS):
        mbarrier.init(shared.dots_full.index(accumulator), count=1)
        mbarrier.init(shared.dots_empty.index(accumulator), count=1)
    tiles = run_last - run_first
    gl.warp_specialize(
        [
            (weigh, (gl.to_tensor(0), tiles, logits_ptr, max_len, shared, C)),
            (weigh, (gl.to_tensor(1), tiles, logits_ptr, max_len, shared, C)),
            (multiply, (tiles, shared)),
            (copy, (run_first, run_last, call, shared, C)),
        ],
        [4, 1, 4],
        [WEIGH_REGISTERS, MULTIPLY_REGISTERS, COPY_REGISTERS],
    )
