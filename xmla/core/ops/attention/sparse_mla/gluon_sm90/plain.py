"""Attention over plain rows on Hopper, in Gluon.

A CTA computes TILE_HEADS heads of a token against its keys, a tile at a time, on three warpgroups:
- The producer, `gather`, copies entries into one of two stages: 0 for even tiles, 1 for odd tiles.
- Two consumers, `attend`, have equal work. The left one computes S = Q·Kᵀ and the softmax of even tiles, and the left
  half of the columns of every tile's P·V; the right one those of odd tiles, and the right half. The products of one run
  during the softmax of the other.
The consumers exchange a tile's maximum as soon as it is known, so that sums are rescaled before P is ready. P is stored
over the roped dims of its tile, which only S needs. Of an even tile e and the odd one o after it, an arrow from who
arrives at a barrier to who waits for it:

              gather                left consumer                           right consumer
    e, o      e → full[·][0] ─────► S(e)
              o → full[·][1] ─────────────────────────────────────────────► S(o)
                                    maximum(e) → maximum_full[0] ─────────► sums rescaled
                                    P(e) → p_full[0] ─────────────────────► P·V right(e)
                                    P·V left(e)                             maximum(o) → maximum_full[1]
                                    sums rescaled ◄──────────────────────── P(o) → p_full[1]
              e + 2 ◄────────────── → empty[0][0]                           → empty[1][0]
                                    P·V left(o), after p_full[1]            P·V right(o)
              o + 2 ◄────────────── → empty[0][1]                           → empty[1][1]

The consumer that multiplies a half of a stage by P frees it, and the producer refills it at once: the L2 cache limits
the speed of a tile. See benchmarks/log/sparse_mla_prefill.md.
"""

from typing import Any, NamedTuple

from triton import language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.numbers import LOG2E
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

QUERIES = gl.constexpr(TILE_HEADS.value // 2)  # that each consumer copies
# Registers per thread of the producer and of either consumer; all three warpgroups together have 504.
PRODUCER_REGISTERS = gl.constexpr(72)
CONSUMER_REGISTERS = gl.constexpr(216)


class Shared(NamedTuple):
    """Shared memory and its mbarriers; left and right are the halves of the VALUE_DIMS."""

    q: Any  # [half, TILE_HEADS, HALF_DIMS]
    q_tail: Any  # [TILE_HEADS, LAYOUT.tail]
    entries: Any  # [stage · 2 + half, TILE_KEYS, HALF_DIMS]
    p: Any  # [stage, TILE_HEADS, TILE_KEYS]: roped dims of the entries until S is computed, then P
    valid: Any  # [stage, TILE_KEYS] f32: −inf if the slot is invalid, else 0
    seen: Any  # [TILE_KEYS] i32: whether any tile had a valid slot in this row
    maximum: Any  # [stage, TILE_HEADS] f32
    sums: Any  # [PART, TILE_HEADS] f32
    q_full: Any
    full: Any  # left, right: [stage]
    empty: Any  # left, right: [stage]
    maximum_full: Any  # [stage]
    p_full: Any  # [stage]
    sums_full: Any


@gluon.jit
def copy_columns(rows, ok, smem, FIRST: gl.constexpr):
    """Start copies of columns FIRST … of `rows` to `smem` [rows, columns], zeros where not `ok`."""
    COPY: gl.constexpr = rows.type.layout.parent
    column = gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, COPY))
    ptrs = gl.expand_dims(rows + FIRST, 1) + gl.expand_dims(column, 0)
    mask, ptrs = gl.broadcast(gl.expand_dims(ok, 1), ptrs)
    # The plan demands rows on 16 bytes, which the compiler cannot prove of two sources.
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16]), [1, 8])
    async_copy.async_load(smem, ptrs, mask=mask)


@gluon.jit
def gather_tile(main, extra, main_tiles, slot, seen, pair, shared, STAGE: gl.constexpr, C: gl.constexpr):
    """Start copies of a tile, first of the half that is freed first; load the slots of this stage's next tile."""
    FIRST: gl.constexpr = STAGE
    LAST: gl.constexpr = 1 - STAGE
    tile = pair * 2 + STAGE
    entries, _, ok = entry_pointers(main, extra, main_tiles, tile, slot, C)
    slot = load_slots(main, extra, main_tiles, tile + 2, slot.type.layout)
    seen |= ok.to(gl.int32)
    mbarrier.wait(shared.empty[FIRST].index(STAGE), (pair & 1) ^ 1)
    copy_columns(entries, ok, shared.entries.index(STAGE * 2 + FIRST), FIRST * HALF_DIMS)
    async_copy.mbarrier_arrive(shared.full[FIRST].index(STAGE), increment_count=False)
    mbarrier.wait(shared.empty[LAST].index(STAGE), (pair & 1) ^ 1)
    copy_columns(entries, ok, shared.entries.index(STAGE * 2 + LAST), LAST * HALF_DIMS)
    if C.LAYOUT.tail:
        copy_columns(entries, ok, shared.p.index(STAGE), C.LAYOUT.rope_offset)
    async_copy.mbarrier_arrive(shared.full[LAST].index(STAGE), increment_count=False)
    shared.valid.index(STAGE).store(gl.where(ok, 0.0, float("-inf")))
    shared.seen.store(seen)
    mbarrier.arrive(shared.full[LAST].index(STAGE), count=1)
    return slot, seen


@gluon.jit
def gather(main, extra, main_tiles, pairs, shared, C: gl.constexpr):
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 4 × 128 bytes a warp
    wait_for_earlier(C.OVERLAP_LIMIT)
    even = load_slots(main, extra, main_tiles, 0, ROWS)
    odd = load_slots(main, extra, main_tiles, 1, ROWS)
    seen = gl.zeros([TILE_KEYS], gl.int32, ROWS)
    for pair in range(0, pairs):
        even, seen = gather_tile(main, extra, main_tiles, even, seen, pair, shared, 0, C)
        odd, seen = gather_tile(main, extra, main_tiles, odd, seen, pair, shared, 1, C)
    async_copy.wait_group(0)


@gluon.jit
def store_queries(shared, PART: gl.constexpr, task, C: gl.constexpr):
    """Copy half of the queries to shared memory."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    offs_h = task.head_block * TILE_HEADS + PART * QUERIES + gl.arange(0, QUERIES, layout=ROWS)
    rows, ok = task.q_row + offset_of(offs_h, C.Q_STRIDE_H, C.HEADS), offs_h < C.HEADS
    for half in gl.static_range(2):
        copy_columns(rows, ok, shared.q.index(half).slice(PART * QUERIES, QUERIES, 0), half * HALF_DIMS)
    if C.LAYOUT.tail:
        copy_columns(rows, ok, shared.q_tail.slice(PART * QUERIES, QUERIES, 0), VALUE_DIMS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(shared.q_full, count=1)
    mbarrier.wait(shared.q_full, 0)


@gluon.jit
def start_scores(shared, pair, empty_scores, STAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """Start S [TILE_HEADS, TILE_KEYS] of this stage's tile of a pair."""
    FIRST: gl.constexpr = STAGE
    LAST: gl.constexpr = 1 - STAGE
    zero = hidden_zero(pair)
    entries = zero + STAGE * 2
    mbarrier.wait(shared.full[FIRST].index(STAGE), pair & 1)
    fence_async_shared()
    keys = shared.entries.index(entries + FIRST).permute((1, 0))
    s = warpgroup_mma(shared.q.index(zero + FIRST), keys, empty_scores, use_acc=False, is_async=True)
    mbarrier.wait(shared.full[LAST].index(STAGE), pair & 1)
    fence_async_shared()
    keys = shared.entries.index(entries + LAST).permute((1, 0))
    s = warpgroup_mma(shared.q.index(zero + LAST), keys, s, is_async=True)
    if LAYOUT.tail:
        s = warpgroup_mma(shared.q_tail, shared.p.index(zero + STAGE).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def exp2(x):
    """2**x, flushed to 0 below 2**-126: with denormal results it takes five instructions."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def base_of(maximum):
    """The exponent that probabilities are relative to: the maximum, or 0 before the first valid key.

    The maximum is −inf there, and −inf − −inf would be NaN.
    """
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def raise_maximum(scores, valid, maximum, shared, STAGE: gl.constexpr, SCALE: gl.constexpr):
    """Scores in log2, −inf where there is no key; the new maximum, which goes to the other consumer; the rescaling."""
    scores = scores * (SCALE * LOG2E) + gl.expand_dims(valid, 0)
    later = gl.maximum(maximum, gl.max(scores, 1))
    shared.maximum.index(STAGE).store(later)
    mbarrier.arrive(shared.maximum_full.index(STAGE), count=1)
    return scores, later, exp2(maximum - base_of(later))


@gluon.jit
def maximum_of_other(maximum, shared, pair, STAGE: gl.constexpr):
    """The maximum after the other consumer's tile, and the factor that rescales sums so far."""
    mbarrier.wait(shared.maximum_full.index(STAGE), pair & 1)
    later = shared.maximum.index(STAGE).load(maximum.type.layout)
    return later, exp2(maximum - base_of(later))


@gluon.jit
def weights(scores, maximum, shared, STAGE: gl.constexpr):
    """P, which the other consumer gets too, and its sums."""
    p = exp2(scores - gl.expand_dims(base_of(maximum), 1))
    rounded = p.to(shared.p.dtype)
    shared.p.index(STAGE).store(rounded)
    fence_async_shared()
    mbarrier.arrive(shared.p_full.index(STAGE), count=1)
    rounded = gl.convert_layout(rounded, gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
    return rounded, sum_in_threads(p)


@gluon.jit
def multiply(p, out, shared, pair, STAGE: gl.constexpr, PART: gl.constexpr):
    """Start half of a tile's P·V."""
    return warpgroup_mma(p, shared.entries.index(hidden_zero(pair) + STAGE * 2 + PART), out, is_async=True)


@gluon.jit
def free_half(running, shared, STAGE: gl.constexpr, PART: gl.constexpr):
    """Wait for P·V of a half of a stage and free it."""
    out = warpgroup_mma_wait(0, deps=[running])
    mbarrier.arrive(shared.empty[PART].index(STAGE), count=1)
    return out


@gluon.jit
def attend_pair(s, out, maximum, denominator, pair, shared, PART: gl.constexpr, SCALE: gl.constexpr):
    """The softmax of tile 2·pair + PART, and this half of both tiles' P·V."""
    valid = shared.valid.index(PART).load(gl.SliceLayout(0, s.type.tensor_type.layout))
    if PART == 0:
        scores = warpgroup_mma_wait(0, deps=[s])
        scores, maximum, factor = raise_maximum(scores, valid, maximum, shared, 0, SCALE)
        out = scaled(out, factor)
        p, shares = weights(scores, maximum, shared, 0)
        running = multiply(p, out, shared, pair, 0, PART)
        denominator = scaled(denominator, factor) + shares
        maximum, factor = maximum_of_other(maximum, shared, pair, 1)
        denominator = scaled(denominator, factor)
        out = scaled(free_half(running, shared, 0, PART), factor)
        mbarrier.wait(shared.p_full.index(1), pair & 1)
        out = free_half(multiply(shared.p.index(1), out, shared, pair, 1, PART), shared, 1, PART)
    else:
        maximum, factor = maximum_of_other(maximum, shared, pair, 0)
        denominator = scaled(denominator, factor)
        out = scaled(out, factor)
        scores = warpgroup_mma_wait(0, deps=[s])
        mbarrier.wait(shared.p_full.index(0), pair & 1)
        running = multiply(shared.p.index(0), out, shared, pair, 0, PART)
        scores, maximum, factor = raise_maximum(scores, valid, maximum, shared, 1, SCALE)
        p, shares = weights(scores, maximum, shared, 1)
        denominator = scaled(denominator, factor) + shares
        out = scaled(free_half(running, shared, 0, PART), factor)
        out = free_half(multiply(p, out, shared, pair, 1, PART), shared, 1, PART)
    return out, maximum, denominator


@gluon.jit
def attend(pairs, shared, PART: gl.constexpr, task, C: gl.constexpr):
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)

    store_queries(shared, PART, task, C)
    maximum = gl.full([TILE_HEADS], float("-inf"), gl.float32, ROWS)
    denominator = sum_in_threads(gl.zeros([TILE_HEADS, TILE_KEYS], gl.float32, S_LAYOUT))
    out = gl.zeros([TILE_HEADS, HALF_DIMS], gl.float32, O_LAYOUT)
    empty_scores = gl.zeros([TILE_HEADS, TILE_KEYS], gl.float32, S_LAYOUT)
    s = start_scores(shared, 0, empty_scores, PART, C.LAYOUT)
    for pair in tl.range(0, pairs - 1, disable_licm=True):
        out, maximum, denominator = attend_pair(s, out, maximum, denominator, pair, shared, PART, C.SCALE)
        s = start_scores(shared, pair + 1, empty_scores, PART, C.LAYOUT)
    out, maximum, denominator = attend_pair(s, out, maximum, denominator, pairs - 1, shared, PART, C.SCALE)

    shared.sums.index(PART).store(gl.convert_layout(gl.sum(denominator, 1), ROWS))
    mbarrier.arrive(shared.sums_full, count=1)
    mbarrier.wait(shared.sums_full, 0)
    denominator = shared.sums.index(0).load(ROWS) + shared.sums.index(1).load(ROWS)
    rows = task.head_block * TILE_HEADS + gl.arange(0, TILE_HEADS, layout=ROWS)
    seen = gl.max(shared.seen.load(gl.SliceLayout(0, S_LAYOUT)), 0)
    inverse, lse = close_sums(maximum, denominator, seen, rows, task, C)
    if PART == 0:
        gl.store(task.lse_row + rows, lse, mask=rows < C.HEADS)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
    store_half(out, inverse, shared.entries.index(PART), PART, task, C)


@gluon.jit
def attend_plain(main, extra, main_tiles, tiles, task, C: gl.constexpr):
    """Attention of TILE_HEADS heads of a token over plain entries."""
    LAYOUT: gl.constexpr = C.LAYOUT
    gl.static_assert(LAYOUT.dims - LAYOUT.tail == VALUE_DIMS, "the two consumers have the columns of 512 value dims")
    gl.static_assert(LAYOUT.tail == 0 or LAYOUT.tail == TILE_KEYS, "P is stored over roped dims of as many columns")
    gl.static_assert(LAYOUT.row % 8 == 0 and LAYOUT.rope_offset % 8 == 0, "rows are copied by 16 bytes")
    DTYPE: gl.constexpr = task.q_row.dtype.element_ty
    SMEM: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SMEM_V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(DTYPE, [2, TILE_HEADS, HALF_DIMS], SMEM)
    shared = Shared(
        q=q_smem,
        q_tail=gl.allocate_shared_memory(DTYPE, [TILE_HEADS, LAYOUT.tail], SMEM) if LAYOUT.tail else q_smem,
        entries=gl.allocate_shared_memory(DTYPE, [STAGES * 2, TILE_KEYS, HALF_DIMS], SMEM),
        p=gl.allocate_shared_memory(DTYPE, [STAGES, TILE_HEADS, TILE_KEYS], SMEM),
        valid=gl.allocate_shared_memory(gl.float32, [STAGES, TILE_KEYS], SMEM_V),
        seen=gl.allocate_shared_memory(gl.int32, [TILE_KEYS], SMEM_V),
        maximum=gl.allocate_shared_memory(gl.float32, [STAGES, TILE_HEADS], SMEM_V),
        sums=gl.allocate_shared_memory(gl.float32, [2, TILE_HEADS], SMEM_V),
        q_full=mbarrier.allocate_mbarrier(),
        full=(mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)),
        empty=(mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)),
        maximum_full=mbarrier.allocate_mbarrier(batch=STAGES),
        p_full=mbarrier.allocate_mbarrier(batch=STAGES),
        sums_full=mbarrier.allocate_mbarrier(),
    )
    mbarrier.init(shared.q_full, count=2)
    mbarrier.init(shared.sums_full, count=2)
    for stage in gl.static_range(STAGES):
        for half in gl.static_range(2):
            # Copies of 128 threads arrive; for the half that comes last, the warpgroup's stores as well.
            mbarrier.init(shared.full[half].index(stage), count=128 + (half != stage))
            mbarrier.init(shared.empty[half].index(stage), count=1)
        mbarrier.init(shared.maximum_full.index(stage), count=1)
        mbarrier.init(shared.p_full.index(stage), count=1)

    pairs = gl.cdiv(tiles, 2)  # the last tile may have no key
    gl.warp_specialize(
        [
            (attend, (pairs, shared, gl.constexpr(0), task, C)),
            (attend, (pairs, shared, gl.constexpr(1), task, C)),
            (gather, (main, extra, main_tiles, pairs, shared, C)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
