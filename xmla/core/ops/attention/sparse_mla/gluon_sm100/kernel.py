"""Attention on sm_100, in Gluon: products by tcgen05, whose accumulators are in tensor memory.

A CTA computes TILE_HEADS heads of a token against its keys, a tile at a time, in three partitions:
- `gather` copies plain rows into one of two stages, even tiles into 0 and odd ones into 1. Over packed entries
  `gather_packed` does, with warps that dequantise them to bfloat16 rows: the others know of rows alone (producers.py).
- `multiply`, one warp, starts S = Q·Kᵀ of a tile, and P·V of the tile before it.
- `weigh` computes P from S, rescales the sums of P·V where a maximum has grown, and ends the row.
Of a tile t, an arrow from who arrives at a barrier to who waits for it:

    gather                   multiply                              weigh
    t → full[stage] ───────► S(t) → s_full[stage] ───────────────► maximum, P(t)
             └───────────────────────────────────────────────────► valid(t) → empty[stage]
                             S(t + 1)                              waits for out_done of t − 1
                                                                   P(t) stored, sums rescaled
                             P·V(t) ◄───────────────────────────── → p_full
    t + 2 ◄───────────────── → empty[stage], out_done

S has two buffers in tensor memory: S(t + 2) is started after p_full of t + 1, when S(t) has long been read.
"""

from typing import Any, NamedTuple

# By name its functions would outlive the module, and at exit nanobind would tell of leaks.
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from xmla.core.lang.gluon import gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.numbers import LOG2E
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    HALF_DIMS,
    HALVES,
    STAGES,
    TILE_HEADS,
    TILE_KEYS,
    VALUE_DIMS,
    close_sums,
    hidden_zero,
    store_half,
    work_of_cta,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import base_of, exp2
from xmla.core.ops.attention.sparse_mla.gluon_sm100.producers import gather, gather_packed
from xmla.core.values import log2_of

# Registers per thread of the partitions that multiply and gather.
MULTIPLY_REGISTERS = gl.constexpr(72)
GATHER_REGISTERS = gl.constexpr(96)
PACKED_REGISTERS = gl.constexpr(176)  # of entries that are packed; 184, or 80 to multiply, leave the softmax too few
S_LAYOUT = gl.constexpr(blackwell.TensorMemoryLayout((TILE_HEADS.value, TILE_KEYS.value), 1))
OUT_LAYOUT = gl.constexpr(blackwell.TensorMemoryLayout((TILE_HEADS.value, HALF_DIMS.value), 1))


def registers(columns: int) -> gl.constexpr:
    """What four warps load of 64 rows of tensor memory: a warp has 16 rows, half of a row each lane."""
    halves = [[0, 1 << bit] for bit in range(log2_of(columns) - 1)]
    lanes, warps = [[1, 0], [2, 0], [4, 0], [8, 0], [0, columns // 2]], [[16, 0], [32, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(halves, lanes, warps, [], [TILE_HEADS.value, columns]))


S_REGISTERS = registers(TILE_KEYS.value)
OUT_REGISTERS = registers(HALF_DIMS.value)


class Shared(NamedTuple):
    """Shared and tensor memory and mbarriers; left and right are the halves of the VALUE_DIMS."""

    q: Any  # [half, TILE_HEADS, HALF_DIMS]
    q_tail: Any  # [TILE_HEADS, LAYOUT.tail]
    entries: Any  # [stage · 2 + half, TILE_KEYS, HALF_DIMS]
    tails: Any  # [stage, TILE_KEYS, LAYOUT.tail]
    p: Any  # [TILE_HEADS, TILE_KEYS]
    valid: Any  # [stage, TILE_KEYS] f32: −inf if the slot is invalid, else 0
    s: Any  # tensor memory [stage, TILE_HEADS, TILE_KEYS] f32
    out: Any  # tensor memory [half, TILE_HEADS, HALF_DIMS] f32
    full: Any  # [stage]
    empty: Any  # [stage]
    s_full: Any  # [stage]
    p_full: Any
    out_done: Any


@gluon.jit
def start_scores(shared, tile, LAYOUT: gl.constexpr):
    """Start S of a tile, which s_full tells of."""
    stage = tile % STAGES
    mbarrier.wait(shared.full.index(stage), tile // STAGES & 1)
    if not LAYOUT.packed:  # whoever stores has fenced
        fence_async_shared()
    s = shared.s.index(stage)
    for half in gl.static_range(HALVES):
        keys = shared.entries.index(stage * HALVES + half).permute((1, 0))
        blackwell.tcgen05_mma(shared.q.index(hidden_zero(tile) + half), keys, s, use_acc=half > 0, mbarriers=[])
    if LAYOUT.tail:
        blackwell.tcgen05_mma(shared.q_tail, shared.tails.index(stage).permute((1, 0)), s, mbarriers=[])
    blackwell.tcgen05_commit(shared.s_full.index(stage))


@gluon.jit
def multiply(tiles, shared, C: gl.constexpr):
    start_scores(shared, 0, C.LAYOUT)
    for tile in range(0, tiles):
        if tile + 1 < tiles:
            start_scores(shared, tile + 1, C.LAYOUT)
        mbarrier.wait(shared.p_full, tile & 1)
        stage = tile % STAGES
        for half in gl.static_range(HALVES):
            values = shared.entries.index(stage * HALVES + half)
            blackwell.tcgen05_mma(shared.p, values, shared.out.index(half), use_acc=tile > 0, mbarriers=[])
        blackwell.tcgen05_commit(shared.empty.index(stage))
        blackwell.tcgen05_commit(shared.out_done)


@gluon.jit
def weigh(tiles, shared, task, C: gl.constexpr):
    HEADS: gl.constexpr = gl.SliceLayout(1, S_REGISTERS)
    KEYS: gl.constexpr = gl.SliceLayout(0, S_REGISTERS)
    maximum = gl.full([TILE_HEADS], float("-inf"), gl.float32, HEADS)
    denominator = gl.zeros([TILE_HEADS], gl.float32, HEADS)
    seen = gl.full([TILE_KEYS], float("-inf"), gl.float32, KEYS)
    for tile in range(0, tiles):
        stage = tile % STAGES
        mbarrier.wait(shared.full.index(stage), tile // STAGES & 1)
        valid = shared.valid.index(stage).load(KEYS)
        mbarrier.arrive(shared.empty.index(stage), count=1)
        seen = gl.maximum(seen, valid)
        mbarrier.wait(shared.s_full.index(stage), tile // STAGES & 1)
        scores = shared.s.index(stage).load(S_REGISTERS) * (C.SCALE * LOG2E) + gl.expand_dims(valid, 0)
        later = gl.maximum(maximum, gl.max(scores, 1))
        factor = exp2(maximum - base_of(later))
        maximum = later
        p = exp2(scores - gl.expand_dims(base_of(later), 1))
        denominator = denominator * factor + gl.sum(p, 1)
        mbarrier.wait(shared.out_done, (tile & 1) ^ 1)
        shared.p.store(p.to(shared.p.dtype))  # before the sums are loaded, which take 128 registers
        fence_async_shared()
        if (tile > 0) & (gl.min(factor, 0) < 1.0):
            rescale = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, OUT_REGISTERS)), 1)
            for half in gl.static_range(HALVES):
                out = shared.out.index(half)
                out.store(out.load(OUT_REGISTERS) * rescale)
        mbarrier.arrive(shared.p_full, count=1)

    rows = task.head_block * TILE_HEADS + gl.arange(0, TILE_HEADS, layout=HEADS)
    inverse, lse = close_sums(maximum, denominator, (gl.max(seen, 0) == 0.0).to(gl.int32), rows, task, C)
    gl.store(task.lse_row + rows, lse, mask=rows < C.HEADS)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUT_REGISTERS))
    mbarrier.wait(shared.out_done, (tiles & 1) ^ 1)
    for half in gl.static_range(HALVES):
        store_half(shared.out.index(half).load(OUT_REGISTERS), inverse, shared.q.index(half), half, task, C)


@gluon.jit
def sparse_mla_sm100_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if SOURCE.HAS_LENGTHS
    sink_ptr,  # [H] f32 if EPILOGUE.HAS_SINK
    extra_cache_ptr,  # [EXTRA_P, EXTRA_R, ROW] if EXTRA
    extra_slots_ptr,  # [T, EXTRA_K] i32 if EXTRA
    extra_lengths_ptr,  # [T] i32 if EXTRA.HAS_LENGTHS
    cos_sin_ptr,  # [S, E] if EPILOGUE.ROPE
    positions_ptr,  # [T] i32 if EPILOGUE.ROPE
    num_slots,
    num_keys,  # K
    slot_stride,
    num_extra_slots,
    num_extra_keys,  # EXTRA_K
    extra_slot_stride,
    num_positions,  # S
    num_splits,
    split_keys,  # of K rounded up to whole tiles, then EXTRA_K
    out_ptr,  # [T, H, 512]; if SPLIT [T, num_splits, H, 512] f16, normalised, over a power of two a half of dims
    lse_ptr,  # [T, H] f32; if SPLIT [T, num_splits, 1 + HALVES, H] f32, in log2, and the powers
    C: gl.constexpr,  # Attention
):
    LAYOUT: gl.constexpr = C.LAYOUT
    gl.static_assert(LAYOUT.dims - LAYOUT.tail == VALUE_DIMS, "two halves have the columns of 512 value dims")
    gl.static_assert(C.BLOCK_H == TILE_HEADS, "a CTA has TILE_HEADS heads")
    let_next_start(C.OVERLAP_LIMIT)
    main, extra, main_tiles, tiles, task = work_of_cta(
        q_ptr, cache_ptr, slots_ptr, lengths_ptr, sink_ptr, extra_cache_ptr, extra_slots_ptr, extra_lengths_ptr,
        cos_sin_ptr, positions_ptr, num_slots, num_keys, slot_stride, num_extra_slots, num_extra_keys,
        extra_slot_stride, num_positions, num_splits, split_keys, out_ptr, lse_ptr, TILE_KEYS, HALVES, C,
    )  # fmt: skip
    tiles = gl.maximum(tiles, 1)  # one tile of invalid slots if there is no key

    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SMEM: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SMEM_V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(DTYPE, [HALVES, TILE_HEADS, HALF_DIMS], SMEM)
    entries = gl.allocate_shared_memory(DTYPE, [STAGES * HALVES, TILE_KEYS, HALF_DIMS], SMEM)
    shared = Shared(
        q=q,
        q_tail=gl.allocate_shared_memory(DTYPE, [TILE_HEADS, LAYOUT.tail], SMEM) if LAYOUT.tail else q,
        entries=entries,
        tails=gl.allocate_shared_memory(DTYPE, [STAGES, TILE_KEYS, LAYOUT.tail], SMEM) if LAYOUT.tail else entries,
        p=gl.allocate_shared_memory(DTYPE, [TILE_HEADS, TILE_KEYS], SMEM),
        valid=gl.allocate_shared_memory(gl.float32, [STAGES, TILE_KEYS], SMEM_V),
        s=blackwell.allocate_tensor_memory(gl.float32, [STAGES, TILE_HEADS, TILE_KEYS], S_LAYOUT),
        out=blackwell.allocate_tensor_memory(gl.float32, [HALVES, TILE_HEADS, HALF_DIMS], OUT_LAYOUT),
        full=mbarrier.allocate_mbarrier(batch=STAGES),
        empty=mbarrier.allocate_mbarrier(batch=STAGES),
        s_full=mbarrier.allocate_mbarrier(batch=STAGES),
        p_full=mbarrier.allocate_mbarrier(),
        out_done=mbarrier.allocate_mbarrier(),
    )
    mbarrier.init(shared.p_full, count=1)
    mbarrier.init(shared.out_done, count=1)
    for stage in gl.static_range(STAGES):
        # Of packed entries there are stores alone; of rows copies of 128 threads too.
        mbarrier.init(shared.full.index(stage), count=1 if LAYOUT.packed else 129)
        mbarrier.init(shared.empty.index(stage), count=2)
        mbarrier.init(shared.s_full.index(stage), count=1)
    gl.warp_specialize(
        [
            (weigh, (tiles, shared, task, C)),
            (multiply, (tiles, shared, C)),
            (gather_packed if LAYOUT.packed else gather, (main, extra, main_tiles, tiles, shared, task, C)),
        ],
        [1, 4],
        [MULTIPLY_REGISTERS, PACKED_REGISTERS if LAYOUT.packed else GATHER_REGISTERS],
    )
