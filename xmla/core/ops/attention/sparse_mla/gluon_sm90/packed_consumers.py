"""Consumer warpgroups over packed entries: each has half of the columns of P·V.

`attend_left` computes S = Q·Kᵀ and the softmax as well, and hands P and the rescaling factor to `attend_right`, which
prefetches entries into the L2 cache.
"""

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import gl, gluon
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    HALF_DIMS,
    O_LAYOUT,
    S_LAYOUT,
    STAGES,
    TILE_HEADS,
    TILE_KEYS,
    VALUE_DIMS,
    close_sums,
    entry_pointers,
    hidden_zero,
    load_slots,
    scaled,
    store_half,
    sum_in_threads,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.conversion import exponent_of, finite_abs, largest_of, scale_halves

AHEAD = gl.constexpr(3)  # tiles between a prefetch into the L2 cache and the tile's loads; 5 is slower
LINE = gl.constexpr(128)  # bytes of a line of the L2 cache
LINES = gl.constexpr(8)  # that a row of threads can prefetch of an entry
QUERIES = gl.constexpr(TILE_HEADS.value // 2)  # that each of the two warpgroups stores


@gluon.jit
def prefetch(main, extra, main_tiles, tile, slot, C: gl.constexpr):
    """Start to fetch a tile's entries, and their scales, into the L2 cache."""
    THREADS: gl.constexpr = slot.type.layout.parent
    LAYOUT: gl.constexpr = C.LAYOUT
    entries, scales, ok = entry_pointers(main, extra, main_tiles, tile, slot, C)
    line = gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(0, THREADS)), 0) * LINE
    ptrs, line = gl.broadcast(gl.expand_dims(entries, 1) + line, line)
    PAST: gl.constexpr = LAYOUT.footer > 0 or LAYOUT.values == "e2m1"
    END: gl.constexpr = LAYOUT.data + LINE * PAST
    gl.static_assert(END <= LINES * LINE, "an entry has more lines than one prefetch takes")
    if LAYOUT.footer:
        ptrs = gl.where(line < LAYOUT.data, ptrs, gl.expand_dims(scales, 1))
    elif LAYOUT.values == "e2m1":  # its last bytes, which often lie on a line of their own
        ptrs = gl.where(line < LAYOUT.data, ptrs, gl.expand_dims(entries + (LAYOUT.data - 1), 1))
    needed = gl.expand_dims(ok.to(gl.int32), 1) & (line < END).to(gl.int32)
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }
        """, "=r,l,r", [ptrs.to(gl.int64, bitcast=True), needed], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def store_queries(shared, PART: gl.constexpr, task, C: gl.constexpr):
    """Store half of the queries in float16, each divided by a power of two, and the factors that its scores lack."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    HALF_PAIRS: gl.constexpr = HALF_DIMS // 2
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    offs_h = task.head_block * TILE_HEADS + PART * QUERIES + gl.arange(0, QUERIES, layout=gl.SliceLayout(1, PAIRS))
    q_rows = task.q_row + offset_of(offs_h, C.Q_STRIDE_H, C.HEADS)
    rows = gl.expand_dims(q_rows.to(gl.pointer_type(gl.int32), bitcast=True), 1)
    rows += gl.expand_dims(gl.arange(0, HALF_PAIRS, layout=gl.SliceLayout(0, PAIRS)), 0)
    head_ok = gl.expand_dims(offs_h < C.HEADS, 1)
    q0 = gl.load(rows, mask=head_ok, other=0)
    q1 = gl.load(rows + HALF_PAIRS, mask=head_ok, other=0)
    largest = gl.maximum(largest_of(q0), largest_of(q1))
    if C.LAYOUT.tail:
        roped = gl.expand_dims(q_rows + VALUE_DIMS, 1)
        roped += gl.expand_dims(gl.arange(0, C.LAYOUT.tail, layout=gl.SliceLayout(0, PAIRS)), 0)
        q2 = gl.load(roped, mask=head_ok, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, gl.max(finite_abs(q2), 1).to(gl.int32, bitcast=True))
    exponent = exponent_of(largest.to(gl.float32, bitcast=True))
    divisor = power_of_two(-exponent)
    left = shared.q.index(0).reinterpret(gl.int32, [TILE_HEADS, HALF_PAIRS], SMEM_W)
    right = shared.q.index(1).reinterpret(gl.int32, [TILE_HEADS, HALF_PAIRS], SMEM_W)
    left.slice(PART * QUERIES, QUERIES, 0).store(scale_halves(q0, divisor))
    right.slice(PART * QUERIES, QUERIES, 0).store(scale_halves(q1, divisor))
    if C.LAYOUT.tail:
        shared.q_rope.slice(PART * QUERIES, QUERIES, 0).store((q2 * gl.expand_dims(divisor, 1)).to(gl.bfloat16))
    shared.factor.slice(PART * QUERIES, QUERIES, 0).store(power_of_two(exponent) * (C.SCALE * LOG2E))
    fence_async_shared()


@gluon.jit
def start_scores(shared, tile, empty_scores, LAYOUT: gl.constexpr):
    """Start S [TILE_HEADS, TILE_KEYS] of a tile, as soon as each half of its stage is full."""
    stage = tile % STAGES
    zero = hidden_zero(tile)
    left = shared.entries.index(stage * 2).permute((1, 0))
    right = shared.entries.index(stage * 2 + 1).permute((1, 0))
    mbarrier.wait(shared.full[0].index(stage), tile // STAGES & 1)
    s = warpgroup_mma(shared.q.index(zero), left, empty_scores, use_acc=False, is_async=True)
    mbarrier.wait(shared.full[1].index(stage), tile // STAGES & 1)
    s = warpgroup_mma(shared.q.index(zero + 1), right, s, is_async=True)
    if LAYOUT.tail:
        s = warpgroup_mma(shared.q_rope, shared.rope.index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.constexpr_function
def holds_back(LAYOUT):
    """Whether the right P·V waits for S of the next tile, so that it runs during its softmax.

    Nothing else uses the tensor cores then. V4's producer is faster and would wait for this half of the stage.
    """
    return LAYOUT.tail > 0


@gluon.jit
def softmax_tile(s, out, scale, maximum, denominator, tile, shared, HOLD_BACK: gl.constexpr):
    """Online softmax of a tile's scores: P and the factor that rescales sums so far go to shared memory."""
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.tensor_type.layout)
    scores = warpgroup_mma_wait(0, deps=[s])
    if HOLD_BACK:
        mbarrier.arrive(shared.s_done, count=1, pred=tile > 0)
    else:
        gl.barrier()  # 1 % faster over V4's pages if the warps start the softmax together (H200, 2026-11-21)
    exponent = shared.exponent.index(tile % STAGES).load(KEYS)
    valid = shared.valid.index(tile % STAGES).load(KEYS)
    scores = scores * gl.expand_dims(power_of_two(exponent), 0)
    scores = scores * gl.expand_dims(scale, 1) + gl.expand_dims(valid, 0)
    new_maximum = gl.maximum(maximum, gl.max(scores, 1))
    # Before the first valid key the maximum is −inf, and −inf − −inf would be NaN.
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(scores - gl.expand_dims(base, 1))
    rescale = gl.exp2(maximum - base)
    shares = sum_in_threads(p * gl.expand_dims(power_of_two(-exponent), 0))
    denominator = scaled(denominator, rescale) + shares
    p = p.to(gl.float16)
    mbarrier.wait(shared.p_empty, (tile & 1) ^ 1)
    shared.factor.store(rescale)
    shared.p.store(p)
    fence_async_shared()
    mbarrier.arrive(shared.p_full, count=1)
    return scaled(out, rescale), new_maximum, denominator


@gluon.jit
def attend_left(tiles, shared, task, C: gl.constexpr):
    HEADS_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    HEADS_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    KEYS_S: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    HOLD_BACK: gl.constexpr = holds_back(C.LAYOUT)

    store_queries(shared, 0, task, C)
    mbarrier.arrive(shared.q_full, count=1)
    mbarrier.wait(shared.q_full, 0)
    scale = shared.factor.load(HEADS_S)

    maximum = gl.full([TILE_HEADS], float("-inf"), gl.float32, HEADS_S)
    denominator = sum_in_threads(gl.zeros([TILE_HEADS, TILE_KEYS], gl.float32, S_LAYOUT))
    out = gl.zeros([TILE_HEADS, HALF_DIMS], gl.float32, O_LAYOUT)
    empty_scores = gl.zeros([TILE_HEADS, TILE_KEYS], gl.float32, S_LAYOUT)
    s = start_scores(shared, 0, empty_scores, C.LAYOUT)
    for tile in range(0, tiles - 1):
        out, maximum, denominator = softmax_tile(s, out, scale, maximum, denominator, tile, shared, HOLD_BACK)
        running = warpgroup_mma(shared.p, shared.entries.index(tile % STAGES * 2), out, is_async=True)
        s = start_scores(shared, tile + 1, empty_scores, C.LAYOUT)
        out = warpgroup_mma_wait(3 if C.LAYOUT.tail else 2, deps=[running])
        mbarrier.arrive(shared.empty[0].index(tile % STAGES), count=1)
    tile = tiles - 1
    out, maximum, denominator = softmax_tile(s, out, scale, maximum, denominator, tile, shared, HOLD_BACK)
    running = warpgroup_mma(shared.p, shared.entries.index(tile % STAGES * 2), out, is_async=True)

    denominator = gl.convert_layout(gl.sum(denominator, 1), HEADS_S)
    rows = task.head_block * TILE_HEADS + gl.arange(0, TILE_HEADS, layout=HEADS_S)
    inverse, lse = close_sums(maximum, denominator, gl.max(shared.seen.load(KEYS_S), 0), rows, task, C)
    gl.store(task.lse_row + rows, lse, mask=rows < C.HEADS)
    mbarrier.wait(shared.p_empty, tile & 1)
    if HOLD_BACK:  # the last P·V waits for nothing
        mbarrier.arrive(shared.s_done, count=1)
    shared.factor.store(inverse)
    mbarrier.arrive(shared.p_full, count=1)
    out = warpgroup_mma_wait(0, deps=[running])
    store_half(out, gl.convert_layout(inverse, HEADS_O), shared.entries.index(0), 0, task, C)


@gluon.jit
def attend_right(main, extra, main_tiles, tiles, shared, task, C: gl.constexpr):
    HOLD_BACK: gl.constexpr = holds_back(C.LAYOUT)
    AHEADS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))
    store_queries(shared, 1, task, C)
    mbarrier.arrive(shared.q_full, count=1)
    wait_for_earlier(C.OVERLAP_LIMIT)
    FIRST: gl.constexpr = C.FIRST_AHEAD
    for tile in gl.static_range(FIRST, AHEAD):
        ahead = load_slots(main, extra, main_tiles, tile, AHEADS)
        prefetch(main, extra, main_tiles, tile, ahead, C)
    ahead = load_slots(main, extra, main_tiles, AHEAD, AHEADS)
    HEADS_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    out = gl.zeros([TILE_HEADS, HALF_DIMS], gl.float32, O_LAYOUT)
    for tile in range(0, tiles):
        stage = tile % STAGES
        mbarrier.wait(shared.p_full, tile & 1)
        p = shared.p.load(gl.DotOperandLayout(0, O_LAYOUT, 2))
        factor = shared.factor.load(HEADS_O)
        mbarrier.arrive(shared.p_empty, count=1)
        out = out * gl.expand_dims(factor, 1)
        if HOLD_BACK:
            mbarrier.wait(shared.s_done, tile & 1)
        mbarrier.wait(shared.full[1].index(stage), tile // STAGES & 1)
        running = warpgroup_mma(p, shared.entries.index(stage * 2 + 1), out, is_async=True)
        if HOLD_BACK:
            prefetch(main, extra, main_tiles, tile + AHEAD, ahead, C)
            ahead = load_slots(main, extra, main_tiles, tile + AHEAD + 1, AHEADS)
        out = warpgroup_mma_wait(0, deps=[running])
        mbarrier.arrive(shared.empty[1].index(stage), count=1)
        if not HOLD_BACK:
            prefetch(main, extra, main_tiles, tile + AHEAD, ahead, C)
            ahead = load_slots(main, extra, main_tiles, tile + AHEAD + 1, AHEADS)
    mbarrier.wait(shared.p_full, tiles & 1)
    store_half(out, shared.factor.load(HEADS_O), shared.entries.index(1), 1, task, C)
