"""Attention of FEW_HEADS heads over V3.2's entries on Hopper, in Gluon: memory-bound.

A CTA computes 16 heads of a token against its keys, a tile at a time, on four warps; two CTAs share an SM. Raw entries
are copied to shared memory two tiles ahead. Each warp takes one block of 128 latent dims of a product, all of which
share a scale per key. The scale multiplies the block's scores, and P before its product with the block's values, so
that e4m3 converts to float16 without a multiplication. Each entry is read from shared memory twice, straight into the
registers of the product's operands: the dims are permuted so that a thread reads 16 bytes of either operand.

The four warps keep in step, with barriers between the rows below. Meanwhile the entries of tile t + 1 are on their way,
as are the scales of t + 1 and the slots of t + 3:

    tile t    scales, their exponents, and which keys are valid → shared memory; the entries of t have arrived
              each warp Q·Kᵀ of its dims → parts of scores [4, heads, keys] in shared memory
              each warp the sum of four heads' parts, softmax → P, factor in shared memory
              each warp P·V of its dims
              copies of t + 2 start, to where t was

See benchmarks/log/sparse_mla_decode.md.
"""

from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    ROPE_DIMS,
    STAGES,
    TILE_KEYS,
    VALUE_DIMS,
    close_sums,
    entry_pointers,
    exponent_for_half,
    load_slots,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.conversion import exponent_of, finite_abs, small_float

FEW_HEADS = gl.constexpr(16)  # heads per CTA: the rows of an mma.sync
BLOCK_DIMS = gl.constexpr(128)  # that share a scale
BLOCKS = gl.constexpr(VALUE_DIMS.value // BLOCK_DIMS.value)  # one for each warp, as are quarters of the roped dims

# Products [BLOCKS, FEW_HEADS, dims or keys] of the operands LEFT and RIGHT.
DOTS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, DOTS.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, DOTS.value, 2))


def along_dims(rows, dims_in_thread, dims_of_lanes, dims_of_warps):
    """Registers of an operand [rows, dims] of a product over dims: eight rows by four parts of a warp's dims."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, dim] for dim in dims_in_thread] + [[row, 0] for row in (8, 16, 32) if row < rows],
        lane_bases=[[0, dim] for dim in dims_of_lanes] + [[1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, dim] for dim in dims_of_warps],
        block_bases=[],
        shape=[rows, 4 * dims_of_warps[0]],
    )


LATENT = ((1, 2, 4, 8, 16), (32, 64), (128, 256))
ROPED = ((1, 2), (4, 8), (16, 32))
QUERIES = gl.constexpr(along_dims(FEW_HEADS.value, *LATENT))
QUERY_ROPES = gl.constexpr(along_dims(FEW_HEADS.value, *ROPED))
KEYS = gl.constexpr(along_dims(TILE_KEYS.value, *LATENT))
ROPES = gl.constexpr(along_dims(TILE_KEYS.value, *ROPED))
VALUES = gl.constexpr(
    gl.DistributedLinearLayout(  # of a product over keys
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 16], [0, 32], [0, 64]],
        warp_bases=[[0, 128], [0, 256]],
        block_bases=[],
        shape=[TILE_KEYS.value, VALUE_DIMS.value],
    )
)
# Pointers to an entry's words and to its scales: a thread has four words, or the scales of an entry.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
# Scores [BLOCKS, FEW_HEADS, TILE_KEYS]: a warp has all keys of four heads.
PARTS = gl.constexpr(gl.BlockedLayout([4, 1, 4], [1, 4, 8], [1, 4, 1], [2, 1, 0]))
HEADS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(0, PARTS.value)))
KEYS_S = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(0, PARTS.value)))
HEADS_O = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, DOTS.value)))


@gluon.jit
def copy_words(smem, entries, ok, OFFSET: gl.constexpr):
    """Start copies of each entry's words from byte OFFSET on to `smem` [TILE_KEYS, words] i32, zeros if not `ok`."""
    word = gl.expand_dims(gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, WORDS)), 0)
    ptrs = gl.expand_dims((entries + OFFSET).to(gl.pointer_type(gl.int32), bitcast=True), 1) + word
    mask, ptrs = gl.broadcast(gl.expand_dims(ok, 1), ptrs)
    async_copy.async_load(smem, ptrs, mask=mask)


@gluon.jit
def copy_entries(latent, rope, main, slot, C: gl.constexpr):
    entries, _, ok = entry_pointers(main, None, 0, 0, slot, C)
    copy_words(latent, entries, ok, 0)
    copy_words(rope, entries, ok, C.LAYOUT.rope_offset)
    async_copy.commit_group()


@gluon.jit
def load_scales(main, slot, C: gl.constexpr):
    """Scales [TILE_KEYS, BLOCKS] f32, and which entries are valid."""
    _, scales, ok = entry_pointers(main, None, 0, 0, slot, C)
    ptrs = gl.expand_dims(scales.to(gl.pointer_type(gl.float32), bitcast=True), 1)
    ptrs += gl.expand_dims(gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, SCALES)), 0)
    return gl.load(ptrs, mask=gl.expand_dims(ok, 1), other=0.0), ok


@gluon.jit
def load_rows(q_row, head_block, START: gl.constexpr, DIMS: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """DIMS of each of the CTA's queries, in float32."""
    rows = head_block * FEW_HEADS + gl.arange(0, FEW_HEADS, layout=gl.SliceLayout(1, LAYOUT))
    dims = START + gl.arange(0, DIMS, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = gl.expand_dims(q_row + offset_of(rows, C.Q_STRIDE_H, C.HEADS), 1) + gl.expand_dims(dims, 0)
    return gl.load(ptrs, mask=gl.expand_dims(rows < C.HEADS, 1), other=0.0).to(gl.float32)


@gluon.jit
def latent_operand(x):
    """The dims of [rows, VALUE_DIMS] as [BLOCKS, rows, BLOCK_DIMS], in the order in which threads hold them."""
    ROWS: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, (ROWS, BLOCKS, 4, 2, 4, 2, 2)), (1, 0, 3, 4, 5, 2, 6))
    return gl.reshape(x, (BLOCKS, ROWS, BLOCK_DIMS))


@gluon.jit
def rope_operand(x):
    """The dims of [rows, ROPE_DIMS] as [BLOCKS, rows, ROPE_DIMS / BLOCKS], likewise."""
    ROWS: gl.constexpr = x.shape[0]
    return gl.reshape(
        gl.permute(gl.reshape(x, (ROWS, BLOCKS, 4, 2, 2)), (1, 0, 3, 2, 4)), (BLOCKS, ROWS, ROPE_DIMS // BLOCKS)
    )


@gluon.jit
def left(x):
    return gl.convert_layout(x, LEFT, assert_trivial=True)


@gluon.jit
def right(x):
    return gl.convert_layout(x, RIGHT, assert_trivial=True)


@gluon.jit
def by_row(factor):
    """factor [FEW_HEADS] broadcastable to [BLOCKS, FEW_HEADS, …]."""
    return gl.expand_dims(gl.expand_dims(factor, 0), 2)


@gluon.jit
def attend_few_heads(main, tiles, task, C: gl.constexpr):
    """Attention of FEW_HEADS heads of a token over V3.2's entries."""
    LAYOUT: gl.constexpr = C.LAYOUT
    gl.static_assert(LAYOUT.values == "e4m3", "the tile of few heads converts e4m3")
    gl.static_assert(LAYOUT.latent == VALUE_DIMS, "the tile of few heads multiplies 512 latent dims")
    gl.static_assert(LAYOUT.tile == BLOCK_DIMS, "the tile of few heads has a warp for each scale")
    gl.static_assert(
        LAYOUT.scale == "float32" and not LAYOUT.interleaved, "the tile of few heads reads float32 scales in order"
    )
    gl.static_assert(
        LAYOUT.footer > 0 or LAYOUT.scale_offset % 4 == 0, "the tile of few heads reads scales on multiples of 4 bytes"
    )
    gl.static_assert(
        LAYOUT.rope_values == "bfloat16" and LAYOUT.tail == ROPE_DIMS, "the tile of few heads has 64 bf16 roped dims"
    )
    gl.static_assert(
        LAYOUT.data % 16 == 0 and LAYOUT.rope_offset % 16 == 0, "the tile of few heads copies 16 bytes at once"
    )
    SMEM_W: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SMEM_E: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    SMEM_H: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    SMEM_S: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    SMEM_V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SMEM_B: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    latent_smem = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_KEYS, VALUE_DIMS // 4], SMEM_W)
    rope_smem = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_KEYS, ROPE_DIMS // 2], SMEM_W)
    scale_smem = gl.allocate_shared_memory(gl.float32, [TILE_KEYS, BLOCKS], SMEM_B)
    ratio_smem = gl.allocate_shared_memory(gl.float32, [TILE_KEYS, BLOCKS], SMEM_B)  # scales over 2**exponent
    exponent_smem = gl.allocate_shared_memory(gl.int32, [TILE_KEYS], SMEM_V)
    valid_smem = gl.allocate_shared_memory(gl.float32, [TILE_KEYS], SMEM_V)  # −inf if invalid, else the exponent
    parts_smem = gl.allocate_shared_memory(gl.float32, [BLOCKS, FEW_HEADS, TILE_KEYS], SMEM_S)
    p_smem = gl.allocate_shared_memory(gl.float32, [FEW_HEADS, TILE_KEYS], SMEM_H)
    factor_smem = gl.allocate_shared_memory(gl.float32, [FEW_HEADS], SMEM_V)

    wait_for_earlier(C.OVERLAP_LIMIT)
    slots = ()
    for tile in gl.static_range(STAGES):
        slots += (load_slots(main, None, 0, tile, gl.SliceLayout(1, WORDS)),)
    scale_slot = load_slots(main, None, 0, 0, gl.SliceLayout(1, SCALES))
    # A warp has whole rows of queries here.
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    Q_ROPE: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    q = load_rows(task.q_row, task.head_block, 0, VALUE_DIMS, Q, C)
    q_rope = load_rows(task.q_row, task.head_block, VALUE_DIMS, ROPE_DIMS, Q_ROPE, C)
    for tile in gl.static_range(STAGES):
        copy_entries(latent_smem.index(tile), rope_smem.index(tile), main, slots[tile], C)
        if tile == 0:
            scales, ok = load_scales(main, scale_slot, C)
            scale_slot = load_slots(main, None, 0, 1, gl.SliceLayout(1, SCALES))
    slot = load_slots(main, None, 0, STAGES, gl.SliceLayout(1, WORDS))

    # Each query is divided by a power of two. The buffers of scores and P redistribute them to the operand's threads.
    largest = gl.max(finite_abs(q_rope), 1)
    largest = gl.convert_layout(largest, gl.SliceLayout(1, q.type.layout), assert_trivial=True)
    q_exponent = exponent_of(gl.maximum(gl.max(finite_abs(q), 1), largest))
    divisor = power_of_two(-q_exponent)
    rope_divisor = gl.convert_layout(divisor, gl.SliceLayout(1, q_rope.type.layout), assert_trivial=True)
    q_smem = parts_smem.reinterpret(gl.float16, [FEW_HEADS, VALUE_DIMS], SMEM_H)
    q_rope_smem = p_smem.reinterpret(gl.bfloat16, [2 * FEW_HEADS, ROPE_DIMS], SMEM_H).slice(0, FEW_HEADS, 0)
    q_smem.store((q * gl.expand_dims(divisor, 1)).to(gl.float16))
    q_rope_smem.store((q_rope * gl.expand_dims(rope_divisor, 1)).to(gl.bfloat16))
    factor_smem.store(power_of_two(q_exponent) * (C.SCALE * LOG2E))
    gl.barrier()
    queries = left(latent_operand(q_smem.load(QUERIES)))
    query_ropes = left(rope_operand(q_rope_smem.load(QUERY_ROPES)))
    scale = factor_smem.load(HEADS)

    maximum = gl.full([FEW_HEADS], float("-inf"), gl.float32, HEADS)
    denominator = gl.zeros([FEW_HEADS], gl.float32, HEADS)
    seen = gl.zeros([TILE_KEYS], gl.int32, gl.SliceLayout(1, SCALES))  # whether any tile had a key in this row
    out = gl.zeros([BLOCKS, FEW_HEADS, BLOCK_DIMS], gl.float32, DOTS)
    empty_scores = gl.zeros([BLOCKS, FEW_HEADS, TILE_KEYS], gl.float32, DOTS)
    for tile in range(0, tiles):
        stage = tile % STAGES
        exponent = exponent_of(gl.max(finite_abs(scales), 1))
        scale_smem.store(scales)
        ratio_smem.store(scales * gl.expand_dims(power_of_two(-exponent), 1))
        exponent_smem.store(exponent)
        valid_smem.store(gl.where(ok, small_float(exponent), float("-inf")))
        seen |= ok.to(gl.int32)
        async_copy.wait_group(STAGES - 1)
        gl.barrier()
        scales, ok = load_scales(main, scale_slot, C)
        scale_slot = load_slots(main, None, 0, tile + 2, gl.SliceLayout(1, SCALES))

        # Scores of each block of dims, then their sum.
        entries = latent_smem.index(stage).reinterpret(gl.float8e4nv, [TILE_KEYS, VALUE_DIMS], SMEM_E)
        keys = right(gl.permute(latent_operand(entries.load(KEYS).to(gl.float16)), (0, 2, 1)))
        parts = mma_v2(queries, keys, empty_scores)
        parts *= gl.expand_dims(scale_smem.permute((1, 0)).load(gl.SliceLayout(1, DOTS)), 1)
        ropes = rope_smem.index(stage).reinterpret(gl.bfloat16, [TILE_KEYS, ROPE_DIMS], SMEM_H).load(ROPES)
        parts_smem.store(mma_v2(query_ropes, right(gl.permute(rope_operand(ropes), (0, 2, 1))), parts))
        gl.barrier()
        scores = gl.sum(parts_smem.load(PARTS), 0) * gl.expand_dims(scale, 1)
        scores += gl.expand_dims(valid_smem.load(KEYS_S), 0)
        new_maximum = gl.maximum(maximum, gl.max(scores, 1))
        # Before the first valid key the maximum is −inf, and −inf − −inf would be NaN.
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = gl.exp2(scores - gl.expand_dims(base, 1))
        rescale = gl.exp2(maximum - base)
        shares = p * gl.expand_dims(power_of_two(-exponent_smem.load(KEYS_S)), 0)
        denominator = denominator * rescale + gl.sum(shares, 1)
        maximum = new_maximum
        p_smem.store(p)
        factor_smem.store(rescale)
        gl.barrier()

        # P·V: each warp has its own block of dims.
        weights = gl.expand_dims(p_smem.load(gl.SliceLayout(0, LEFT)), 0)
        weights *= gl.expand_dims(ratio_smem.permute((1, 0)).load(gl.SliceLayout(1, LEFT)), 1)
        values = gl.reshape(entries.load(VALUES).to(gl.float16), (TILE_KEYS, BLOCKS, BLOCK_DIMS // 16, 16))
        values = right(gl.reshape(gl.permute(values, (1, 0, 3, 2)), (BLOCKS, TILE_KEYS, BLOCK_DIMS)))
        out = mma_v2(weights.to(gl.float16), values, out * by_row(factor_smem.load(HEADS_O)))
        gl.barrier()
        copy_entries(latent_smem.index(stage), rope_smem.index(stage), main, slot, C)
        slot = load_slots(main, None, 0, tile + STAGES + 1, gl.SliceLayout(1, WORDS))
    async_copy.wait_group(0)

    rows = task.head_block * FEW_HEADS + gl.arange(0, FEW_HEADS, layout=HEADS)
    inverse, lse = close_sums(maximum, denominator, gl.max(seen, 0), rows, task, C)
    gl.store(task.lse_row + rows, lse, mask=rows < C.HEADS)
    share = by_row(gl.convert_layout(inverse, HEADS_O))
    out = out * share
    if C.SPLIT:
        out_exponent = exponent_for_half(out, 2)  # [BLOCKS, FEW_HEADS]
        block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, out_exponent.type.layout))
        power_rows = task.head_block * FEW_HEADS + gl.arange(
            0, FEW_HEADS, layout=gl.SliceLayout(0, out_exponent.type.layout)
        )
        ptrs = task.lse_row + gl.expand_dims((1 + block) * C.HEADS, 1) + gl.expand_dims(power_rows, 0)
        gl.store(ptrs, power_of_two(out_exponent), mask=gl.expand_dims(power_rows < C.HEADS, 0))
        out = out * gl.expand_dims(power_of_two(-out_exponent), 2)
    out = gl.where(share < 0.0, 0.0, out).to(task.out_row.dtype.element_ty)
    out = gl.reshape(
        gl.permute(gl.reshape(out, (BLOCKS, FEW_HEADS, 16, BLOCK_DIMS // 16)), (1, 0, 3, 2)), (FEW_HEADS, VALUE_DIMS)
    )
    out = gl.convert_layout(out, QUERIES, assert_trivial=True)  # 16 adjacent dims a thread
    rows = task.head_block * FEW_HEADS + gl.arange(0, FEW_HEADS, layout=gl.SliceLayout(1, QUERIES))
    dims = gl.arange(0, VALUE_DIMS, layout=gl.SliceLayout(0, QUERIES))
    ptrs = task.out_row + gl.expand_dims(offset_of(rows, VALUE_DIMS, C.HEADS), 1) + gl.expand_dims(dims, 0)
    gl.store(ptrs, out, mask=gl.expand_dims(rows < C.HEADS, 1))
