"""Attention on SM12x, in Gluon: products by mma.sync, in 99 KB of shared memory.

A CTA computes BLOCK_H heads of a token against its keys, a tile at a time. Entries are copied to shared memory by 16
bytes, tiles ahead; packed ones are then dequantised, once for all heads of the CTA. GROUPS groups of warps divide the
dims of the entries: each has its part of the queries in registers, reads its part of the entries from shared memory for
either product, and no product is computed twice. The groups' scores are added through shared memory.

The warps keep in step, with barriers between the rows below. Meanwhile the entries of the next tiles are on their way:
of packed ones two, since a stage is free once it is dequantised, of plain rows one.

    tile t    packed entries dequantised, once, → 16-bit rows
              each group Q·Kᵀ of its dims → parts of scores [groups, heads, keys] in shared memory
              copies start to the stage that is free; sum of the parts, softmax → P, factor in shared memory
              each group P·V of its dims

See benchmarks/log/sm12x.md.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    ROPE_DIMS,
    VALUE_DIMS,
    close_sums,
    entry_pointers,
    exponent_for_half,
    load_slots,
    work_of_cta,
)

GROUPS = gl.constexpr(4)  # of dims: a quarter of the roped ones fills the 16 of an mma.sync
GROUP_DIMS = gl.constexpr(VALUE_DIMS.value // GROUPS.value)
STAGES = gl.constexpr(2)  # tiles of entries in shared memory

BLOCK_N = gl.constexpr(32)  # keys of a tile
WARPS = gl.constexpr(8)

WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [WARPS.value, 1], [1, 0]))  # of entries: eight lanes copy one
ROWS = gl.constexpr(gl.SliceLayout(1, WORDS.value))
DIMS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS.value, 1], [1, 0]))  # of the output
# Of codes: a thread has eight dims of every 64 of one entry, so that it reads the entry's scales at once, and which of
# its registers are roped dims is known when it is compiled. Of the 16 lanes that a load of 8 bytes serves at once eight
# have an entry and eight the fourth after it, whose words are in the other banks.
CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 64], [0, 128], [0, 256]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [4, 0], [1, 0]],
        warp_bases=[[2, 0], [8, 0], [16, 0]],
        block_bases=[],
        shape=[BLOCK_N.value, VALUE_DIMS.value],
    )
)
SMEM_WORDS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # 16 bytes at once, as in the two below
SMEM_BYTES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
SMEM_HALVES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SMEM_DENSE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SMEM_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SMEM_PARTS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
SMEM_P = gl.constexpr(gl.SwizzledSharedLayout(8, 64 // BLOCK_N.value, BLOCK_N.value // 8, [1, 0]))


class Copied(NamedTuple):
    """Tiles of entries in shared memory, a stage each."""

    latent: Any  # [STAGES, BLOCK_N, words] i32: the dims that attention uses as values
    rope: Any  # [STAGES, BLOCK_N, ROPE_DIMS / 2] i32, if they are apart
    scales: Any  # [STAGES, BLOCK_N, words] i32 if packed
    valid: Any  # [STAGES, BLOCK_N] i32: whether the slot is valid


@gluon.constexpr_function
def products(BLOCK_H):
    """The layout of products [GROUPS, BLOCK_H, dims or keys]: warps by groups, then by 16 heads or by columns."""
    heads = BLOCK_H // 16
    return gl.NVMMADistributedLayout(
        version=[2, 0],
        warps_per_cta=[GROUPS.value, heads, WARPS.value // GROUPS.value // heads],
        instr_shape=[1, 16, 8],
    )


@gluon.constexpr_function
def summands(BLOCK_H):
    """The layout of the groups' scores [GROUPS, BLOCK_H, BLOCK_N]: a thread adds its own, a warp has rows of keys."""
    keys = BLOCK_H * BLOCK_N.value // (32 * WARPS.value)
    lanes = BLOCK_N.value // keys
    return gl.BlockedLayout([GROUPS.value, 1, keys], [1, 32 // lanes, lanes], [1, WARPS.value, 1], [2, 1, 0])


@gluon.constexpr_function
def scale_words(LAYOUT):
    """Words that hold an entry's scales."""
    return (LAYOUT.footer or LAYOUT.scales * LAYOUT.scale_bytes) // 4


@gluon.constexpr_function
def rope_is_apart(LAYOUT):
    """Whether an entry's roped dims are copied beside its other dims."""
    return LAYOUT.tail > 0 or LAYOUT.rope_values == "bfloat16"


@gluon.jit
def copy_words(smem, rows, ok):
    """Start copies of the words from `rows` on to `smem` [rows, words] i32, 16 bytes at once; zeros if not `ok`."""
    UNIT: gl.constexpr = min(smem.shape[1], 4)
    word = gl.expand_dims(gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, rows.type.layout.parent)), 0)
    ptrs = gl.expand_dims(rows.to(gl.pointer_type(gl.int32), bitcast=True), 1) + word
    mask, ptrs = gl.broadcast(gl.expand_dims(ok, 1), ptrs)
    # The plan demands entries on 16 bytes, which the compiler cannot prove of two sources.
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [4 * UNIT, 4 * UNIT]), [1, UNIT])
    async_copy.async_load(smem, ptrs, mask=mask)


@gluon.jit
def copy_tile(copied, main, extra, main_tiles, tile, slot, C: gl.constexpr):
    """Start the copies of a tile's entries at `slot`, and note which slots are valid."""
    stage = tile % STAGES
    entries, scales, ok = entry_pointers(main, extra, main_tiles, tile, slot, C)
    copied.valid.index(stage).store(ok.to(gl.int32))
    copy_words(copied.latent.index(stage), entries, ok)
    if rope_is_apart(C.LAYOUT):
        copy_words(copied.rope.index(stage), entries + C.LAYOUT.rope_offset, ok)
    if C.LAYOUT.packed:
        copy_words(copied.scales.index(stage), scales, ok)
    async_copy.commit_group()


@gluon.jit
def decode_ue8m0(byte):
    """float32 scales of UE8M0 bytes: 0 is 2**-127, below the normal numbers, and 255 is NaN."""
    exponent = byte.to(gl.int32)
    bits = gl.where(exponent == 0, 0x00400000, gl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def dequantise(copied, stage, entries, C: gl.constexpr):
    """Store a tile's entries in `entries` [BLOCK_N, VALUE_DIMS]."""
    LAYOUT: gl.constexpr = C.LAYOUT
    # In bfloat16 a code is exact, and so is a power of two: their product has the bits of that in float32.
    UNIT: gl.constexpr = gl.float32 if LAYOUT.scale == "float32" else entries.dtype
    TILES: gl.constexpr = VALUE_DIMS // LAYOUT.tile  # of dims that share a scale
    codes = copied.latent.index(stage).reinterpret(gl.float8e4nv, [BLOCK_N, VALUE_DIMS], SMEM_BYTES)
    x = gl.reshape(codes.load(CODES).to(gl.float32).to(UNIT), (BLOCK_N, TILES, LAYOUT.tile))
    OF_TILES: gl.constexpr = gl.SliceLayout(2, x.type.layout)
    if LAYOUT.scale == "float32":
        scale = copied.scales.index(stage).reinterpret(gl.float32, [BLOCK_N, TILES], SMEM_DENSE).load(OF_TILES)
    else:
        bytes_smem = copied.scales.index(stage).reinterpret(gl.uint8, [BLOCK_N, TILES], SMEM_DENSE)
        scale = decode_ue8m0(bytes_smem.load(OF_TILES)).to(UNIT)
    x = (x * gl.expand_dims(scale, 2)).to(entries.dtype)
    if LAYOUT.rope_in_value and rope_is_apart(LAYOUT):  # they take the place of the last tile
        rope = copied.rope.index(stage).reinterpret(gl.bfloat16, [BLOCK_N, ROPE_DIMS], SMEM_HALVES)
        tile = gl.arange(0, TILES, layout=gl.SliceLayout(0, OF_TILES))
        is_rope = gl.expand_dims(gl.expand_dims(tile, 0), 2) == TILES - 1
        x = gl.where(is_rope, gl.expand_dims(rope.load(gl.SliceLayout(1, x.type.layout)).to(entries.dtype), 1), x)
    entries.store(gl.convert_layout(gl.reshape(x, (BLOCK_N, VALUE_DIMS)), CODES, assert_trivial=True))


@gluon.jit
def by_row(factor):
    """factor [BLOCK_H] broadcastable to [GROUPS, BLOCK_H, …]."""
    return gl.expand_dims(gl.expand_dims(factor, 0), 2)


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
def rotate_back(out, rotation, ROPE: gl.constexpr):
    """The inverse rope on the last ROPE columns of out [BLOCK_H, VALUE_DIMS], which rotates adjacent pairs."""
    HEADS: gl.constexpr = out.shape[0]
    PARTS: gl.constexpr = VALUE_DIMS // ROPE
    even, odd = gl.split(gl.reshape(out, (HEADS, PARTS, ROPE // 2, 2)))
    PAIRS: gl.constexpr = even.type.layout
    offs = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, PAIRS)))
    mask = offs < gl.where(rotation.known, ROPE // 2, 0)
    cos = gl.load(rotation.cos_sin + offs, mask=mask, other=1.0).to(gl.float32)
    sin = gl.load(rotation.cos_sin + ROPE // 2 + offs, mask=mask, other=0.0).to(gl.float32)
    cos = gl.expand_dims(gl.expand_dims(cos, 0), 0)
    sin = gl.expand_dims(gl.expand_dims(sin, 0), 0)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    is_rope = gl.expand_dims(gl.expand_dims(part, 0), 2) == PARTS - 1
    turned_even = gl.where(is_rope, even * cos + odd * sin, even)
    turned_odd = gl.where(is_rope, odd * cos - even * sin, odd)
    return gl.convert_layout(
        gl.reshape(gl.join(turned_even, turned_odd), (HEADS, VALUE_DIMS)), out.type.layout, assert_trivial=True
    )


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
        gl.static_assert(not LAYOUT.interleaved, "SM12x's kernel reads scales in order")
        gl.static_assert(
            LAYOUT.footer > 0 or LAYOUT.scale_offset % 16 == 0, "SM12x's kernel copies an entry's scales at once"
        )
        gl.static_assert(
            LAYOUT.tail > 0 or not rope_is_apart(LAYOUT) or LAYOUT.tile == ROPE_DIMS,
            "SM12x's kernel has roped dims in place of the last tile",
        )


@gluon.jit
def attend(main, extra, main_tiles, tiles, task, C: gl.constexpr):
    """Attention of BLOCK_H heads of a token."""
    BLOCK_H: gl.constexpr = C.BLOCK_H
    LAYOUT: gl.constexpr = C.LAYOUT
    check_constants(LAYOUT, BLOCK_H)
    DTYPE: gl.constexpr = task.q_row.dtype.element_ty
    DOTS: gl.constexpr = products(BLOCK_H)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, DOTS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, DOTS, 2)
    HEADS_O: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, DOTS))
    PARTS: gl.constexpr = summands(BLOCK_H)
    HEADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, PARTS))
    KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, PARTS))
    # Tiles whose copies are under way: those of packed entries are free once they are dequantised.
    AHEAD: gl.constexpr = STAGES if LAYOUT.packed else STAGES - 1

    q = load_queries(task, 0, VALUE_DIMS, BLOCK_H, LEFT, C)
    if LAYOUT.tail:
        q_tail = load_queries(task, VALUE_DIMS, ROPE_DIMS, BLOCK_H, LEFT, C)

    VALUE_WORDS: gl.constexpr = VALUE_DIMS // 4 if LAYOUT.packed else VALUE_DIMS // 2
    latent = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, VALUE_WORDS], SMEM_WORDS)
    rope, scales, dequantised = latent, latent, latent
    if rope_is_apart(LAYOUT):
        rope = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, ROPE_DIMS // 2], SMEM_WORDS)
    if LAYOUT.packed:
        scales = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, scale_words(LAYOUT)], SMEM_DENSE)
        dequantised = gl.allocate_shared_memory(DTYPE, [BLOCK_N, VALUE_DIMS], SMEM_HALVES)
    copied = Copied(latent, rope, scales, gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], SMEM_VECTOR))
    parts_smem = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_H, BLOCK_N], SMEM_PARTS)
    p_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_H, BLOCK_N], SMEM_P)
    factor_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_H], SMEM_VECTOR)

    slot = load_slots(main, extra, main_tiles, 0, ROWS, BLOCK_N)
    for tile in gl.static_range(AHEAD):
        copy_tile(copied, main, extra, main_tiles, tile, slot, C)
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
        if LAYOUT.packed:
            dequantise(copied, stage, dequantised, C)
            gl.barrier()
            entries = dequantised
        else:
            entries = latent.index(stage).reinterpret(DTYPE, [BLOCK_N, VALUE_DIMS], SMEM_HALVES)
        parts = mma_v2(q, as_keys(entries, GROUP_DIMS).load(RIGHT), no_scores)
        if LAYOUT.tail:
            tail = rope.index(stage).reinterpret(DTYPE, [BLOCK_N, ROPE_DIMS], SMEM_HALVES)
            parts = mma_v2(q_tail, as_keys(tail, ROPE_DIMS // GROUPS).load(RIGHT), parts)
        parts_smem.store(parts)
        valid = copied.valid.index(stage).load(KEYS)
        gl.barrier()
        copy_tile(copied, main, extra, main_tiles, tile + AHEAD, slot, C)
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
        exponent = exponent_for_half(out, 2)  # [GROUPS, BLOCK_H]
        group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, exponent.type.layout))
        head = task.head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, exponent.type.layout))
        ptrs = task.lse_row + gl.expand_dims((1 + group) * C.HEADS, 1) + gl.expand_dims(head, 0)
        gl.store(ptrs, power_of_two(exponent), mask=gl.expand_dims(head < C.HEADS, 0))
        out = out * gl.expand_dims(power_of_two(-exponent), 2)
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
    attend(main, extra, main_tiles, tiles, task, C)
