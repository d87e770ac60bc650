"""Attention on SM12x, in Gluon: products by mma.sync, in 99 KB of shared memory.

A CTA computes BLOCK_H heads of a token against its keys, a tile at a time. Entries are copied to shared memory by 16
bytes, tiles ahead. GROUPS groups of warps divide their dims: each has its part of the queries in registers, reads its
part of the entries from shared memory for either product, and no product is computed twice. The groups' scores are
added through shared memory. Packed entries are converted as they are read (packed.py).

Over plain rows the warps keep in step, with barriers between the rows below. Meanwhile the entries of the next tile are
on their way.

    tile t    each group Q·Kᵀ of its dims → parts of scores [groups, heads, keys] in shared memory
              copies start to the stage that is free; sum of the parts, softmax → P, factor in shared memory
              each group P·V of its dims

See benchmarks/log/sm12x.md.
"""

from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    ROPE_DIMS,
    VALUE_DIMS,
    close_sums,
    load_slots,
    work_of_cta,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm120.common import (
    BLOCK_N,
    GROUP_DIMS,
    GROUPS,
    ROWS,
    SMEM_HALVES,
    SMEM_P,
    SMEM_PARTS,
    SMEM_VECTOR,
    SMEM_WORDS,
    WARPS,
    Copied,
    by_row,
    copy_tile,
    over_powers,
    rope_is_apart,
    rotate_back,
    scale_words,
    summands,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm120.packed import TILE_DIMS, attend_packed

STAGES = gl.constexpr(2)  # tiles of entries in shared memory

DIMS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS.value, 1], [1, 0]))  # of the output


@gluon.constexpr_function
def products(BLOCK_H):
    """The layout of products [GROUPS, BLOCK_H, dims or keys]: warps by groups, then by 16 heads or by columns."""
    heads = BLOCK_H // 16
    return gl.NVMMADistributedLayout(
        version=[2, 0],
        warps_per_cta=[GROUPS.value, heads, WARPS.value // GROUPS.value // heads],
        instr_shape=[1, 16, 8],
    )


@gluon.jit
def load_queries(task, START: gl.constexpr, DIMS: gl.constexpr, BLOCK_H: gl.constexpr, LEFT: gl.constexpr,
                 C: gl.constexpr):  # fmt: skip
    """DIMS of the CTA's queries as the left operand [GROUPS, BLOCK_H, DIMS / GROUPS] of a product."""
    PART: gl.constexpr = DIMS // GROUPS
    head = task.head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    dim = START + gl.arange(0, PART, layout=gl.SliceLayout(0, gl.SliceLayout(0, LEFT)))
    offs = gl.expand_dims(gl.expand_dims(group * PART, 1), 2) + gl.expand_dims(gl.expand_dims(dim, 0), 0)
    ptrs = by_row(task.q_row + offset_of(head, C.Q_STRIDE_H, C.HEADS)) + offs
    mask, ptrs = gl.broadcast(by_row(head < C.HEADS), ptrs)
    return gl.load(ptrs, mask=mask, other=0.0)


@gluon.jit
def as_keys(entries, DIMS: gl.constexpr):
    """Entries [BLOCK_N, GROUPS · DIMS] in shared memory as [GROUPS, DIMS, BLOCK_N]."""
    return entries.reshape((entries.shape[0], GROUPS, DIMS)).permute((1, 2, 0))


@gluon.jit
def as_values(entries):
    """Entries [BLOCK_N, VALUE_DIMS] in shared memory as [GROUPS, BLOCK_N, GROUP_DIMS]."""
    return entries.reshape((entries.shape[0], GROUPS, GROUP_DIMS)).permute((1, 0, 2))


@gluon.jit
def check_constants(LAYOUT: gl.constexpr, BLOCK_H: gl.constexpr):
    ROW_UNIT: gl.constexpr = 1 if LAYOUT.packed else 2  # bytes
    VALUES: gl.constexpr = LAYOUT.latent + (LAYOUT.rope if LAYOUT.rope_in_value else 0)
    gl.static_assert(BLOCK_H == 16 or BLOCK_H == 32, "SM12x's kernel has tiles of 16 or 32 heads")
    gl.static_assert(VALUES == VALUE_DIMS, "SM12x's kernel multiplies 512 dims")
    gl.static_assert(
        LAYOUT.data * ROW_UNIT % 16 == 0 and LAYOUT.rope_offset * ROW_UNIT % 16 == 0,
        "SM12x's kernel copies 16 bytes at once",
    )
    if rope_is_apart(LAYOUT):
        gl.static_assert(
            LAYOUT.rope == ROPE_DIMS and (LAYOUT.rope_values == "bfloat16" or not LAYOUT.packed),
            "SM12x's kernel has 64 roped dims of 16 bits",
        )
    if LAYOUT.packed:
        gl.static_assert(LAYOUT.values == "e4m3", "SM12x's kernel converts e4m3")
        gl.static_assert(
            LAYOUT.scale != "e4m3" and VALUE_DIMS // LAYOUT.tile * LAYOUT.scale_bytes == 4 * scale_words(LAYOUT),
            "SM12x's kernel reads float32 or UE8M0 scales of 512 dims",
        )
        gl.static_assert(
            LAYOUT.tile == (TILE_DIMS if LAYOUT.scale == "ue8m0" else GROUP_DIMS),
            "SM12x's kernel has a group of warps for each float32 scale, a warp for each UE8M0 scale",
        )
        gl.static_assert(
            LAYOUT.rope == 0 or (rope_is_apart(LAYOUT) and LAYOUT.rope_in_value == (LAYOUT.scale == "ue8m0")),
            "SM12x's kernel has roped values beside UE8M0 scales",
        )
        gl.static_assert(not LAYOUT.interleaved, "SM12x's kernel reads scales in order")
        gl.static_assert(
            LAYOUT.footer > 0 or LAYOUT.scale_offset % 16 == 0, "SM12x's kernel copies an entry's scales at once"
        )


@gluon.jit
def attend_rows(main, extra, main_tiles, tiles, task, C: gl.constexpr):
    """Attention of BLOCK_H heads of a token over plain rows."""
    BLOCK_H: gl.constexpr = C.BLOCK_H
    LAYOUT: gl.constexpr = C.LAYOUT
    DTYPE: gl.constexpr = task.q_row.dtype.element_ty
    DOTS: gl.constexpr = products(BLOCK_H)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DOTS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, DOTS, 2)
    HEADS_O: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, DOTS))
    PARTS: gl.constexpr = summands(BLOCK_H)
    HEADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, PARTS))
    KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, PARTS))
    AHEAD: gl.constexpr = STAGES - 1  # tiles whose copies are under way

    q = load_queries(task, 0, VALUE_DIMS, BLOCK_H, LEFT, C)
    if LAYOUT.tail:
        q_tail = load_queries(task, VALUE_DIMS, ROPE_DIMS, BLOCK_H, LEFT, C)

    latent = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, VALUE_DIMS // 2], SMEM_WORDS)
    rope = latent
    if LAYOUT.tail:
        rope = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, ROPE_DIMS // 2], SMEM_WORDS)
    copied = Copied(latent, rope, None, gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], SMEM_VECTOR))
    parts_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_H, BLOCK_N], SMEM_PARTS)
    p_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_H, BLOCK_N], SMEM_P)
    factor_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_H], SMEM_VECTOR)

    slot = load_slots(main, extra, main_tiles, 0, ROWS, BLOCK_N)
    for tile in gl.static_range(AHEAD):
        copy_tile(copied, tile, main, extra, main_tiles, tile, slot, C)
        slot = load_slots(main, extra, main_tiles, tile + 1, ROWS, BLOCK_N)

    maximum = gl.full([BLOCK_H], float("-inf"), gl.float32, HEADS)
    denominator = gl.zeros([BLOCK_H], gl.float32, HEADS)
    seen = gl.zeros([BLOCK_N], gl.int32, KEYS)  # whether any tile had a key in this row
    out = gl.zeros([GROUPS, BLOCK_H, GROUP_DIMS], gl.float32, DOTS)
    no_scores = gl.zeros([GROUPS, BLOCK_H, BLOCK_N], gl.float32, DOTS)
    no_weights = gl.zeros([GROUPS, BLOCK_H, BLOCK_N], DTYPE, LEFT)
    for tile in range(0, tiles):
        stage = tile % STAGES
        async_copy.wait_group(AHEAD - 1)
        gl.barrier()
        entries = latent.index(stage).reinterpret(DTYPE, [BLOCK_N, VALUE_DIMS], SMEM_HALVES)
        parts = mma_v2(q, as_keys(entries, GROUP_DIMS).load(RIGHT), no_scores)
        if LAYOUT.tail:
            tail = rope.index(stage).reinterpret(DTYPE, [BLOCK_N, ROPE_DIMS], SMEM_HALVES)
            parts = mma_v2(q_tail, as_keys(tail, ROPE_DIMS // GROUPS).load(RIGHT), parts)
        parts_smem.store(parts)
        valid = copied.valid.index(stage).load(KEYS)
        gl.barrier()
        copy_tile(copied, (tile + AHEAD) % STAGES, main, extra, main_tiles, tile + AHEAD, slot, C)
        slot = load_slots(main, extra, main_tiles, tile + AHEAD + 1, ROWS, BLOCK_N)

        scores = gl.sum(parts_smem.load(PARTS), 0) * (C.SCALE * LOG2E)
        scores = gl.where(gl.expand_dims(valid, 0) != 0, scores, float("-inf"))
        seen |= valid
        new_maximum = gl.maximum(maximum, gl.max(scores, 1))
        # Before the first valid key the maximum is −inf, and −inf − −inf would be NaN.
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = gl.exp2(scores - gl.expand_dims(base, 1))
        rescale = gl.exp2(maximum - base)
        denominator = denominator * rescale + gl.sum(p, 1)
        maximum = new_maximum
        p_smem.store(p.to(DTYPE))
        factor_smem.store(rescale)
        gl.barrier()

        weights, _ = gl.broadcast(gl.expand_dims(p_smem.load(gl.SliceLayout(0, LEFT)), 0), no_weights)
        out = mma_v2(weights, as_values(entries).load(RIGHT), out * by_row(factor_smem.load(HEADS_O)))
    async_copy.wait_group(0)

    rows = task.head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=HEADS)
    inverse, lse = close_sums(maximum, denominator, gl.max(seen, 0), rows, task, C)
    gl.store(task.lse_row + rows, lse, mask=rows < C.HEADS)
    share = by_row(gl.convert_layout(inverse, HEADS_O))
    out = out * share
    if C.SPLIT:
        out = over_powers(out, task, C)
    out = gl.reshape(gl.permute(gl.where(share < 0.0, 0.0, out), (1, 0, 2)), (BLOCK_H, VALUE_DIMS))
    if task.rotation is not None:
        out = rotate_back(out, task.rotation, C.EPILOGUE.ROPE)
    result = gl.convert_layout(out.to(task.out_row.dtype.element_ty), DIMS)
    offs_h = task.head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, DIMS))
    offs_l = gl.arange(0, VALUE_DIMS, layout=gl.SliceLayout(0, DIMS))
    out_ptrs = task.out_row + gl.expand_dims(offset_of(offs_h, VALUE_DIMS, C.HEADS), 1) + gl.expand_dims(offs_l, 0)
    gl.store(out_ptrs, result, mask=gl.expand_dims(offs_h < C.HEADS, 1))


@gluon.jit
def sparse_mla_sm120_kernel(
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
    out_ptr,  # [T, H, 512]; if SPLIT [T, num_splits, H, 512] f16, normalised, over powers of two
    lse_ptr,  # [T, H] f32; if SPLIT [T, num_splits, 1 + GROUPS, H] f32, in log2, and the powers
    C: gl.constexpr,  # Attention
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    main, extra, main_tiles, tiles, task = work_of_cta(
        q_ptr, cache_ptr, slots_ptr, lengths_ptr, sink_ptr, extra_cache_ptr, extra_slots_ptr, extra_lengths_ptr,
        cos_sin_ptr, positions_ptr, num_slots, num_keys, slot_stride, num_extra_slots, num_extra_keys,
        extra_slot_stride, num_positions, num_splits, split_keys, out_ptr, lse_ptr, BLOCK_N, GROUPS, C,
    )  # fmt: skip
    check_constants(C.LAYOUT, C.BLOCK_H)
    if C.LAYOUT.packed:
        attend_packed(main, extra, main_tiles, tiles, task, C)
    else:
        attend_rows(main, extra, main_tiles, tiles, task, C)
