"""Attention of 16 heads over V3.2's entries on Hopper, in Gluon: what memory delivers decides, not the products.

One program: 16 heads of a token against its keys, 64 at a time, on four warps; two programs share an SM. Entries come
to shared memory as they are, two tiles ahead. A warp has one block of 128 latent dims, and one number is the scale of a
key's block: it multiplies the block's scores, and weights before they meet the block's values, so e4m3 becomes float16
without a product. Entries are read from shared memory twice, into the registers of the threads that multiply them: dims
are taken in an order in which either operand of a product is 16 bytes a thread.
See benchmarks/log/sparse_mla_decode.md.
"""

from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from xmla.core.gluon import async_copy, gl, gluon
from xmla.core.lang import LOG2E
from xmla.core.offsets import gluon_offset_of as offset_of
from xmla.core.ops.sparse_mla.gluon_sm90.common import (
    close_sums,
    entry_pointers,
    exponent_of,
    finite_abs,
    load_slots,
    power_of_two,
    small_float,
)

H = gl.constexpr(16)
N = gl.constexpr(64)
BLOCKS = gl.constexpr(4)  # of 128 dims, a warp each; the roped dims are dealt out to the warps as well
STAGES = gl.constexpr(2)

# [BLOCKS, 16, dims or keys], whose operands are LEFT and RIGHT
DOTS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, DOTS.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, DOTS.value, 2))


def along_dims(rows, dims_in_thread, dims_of_lanes, dims_of_warps):
    """[rows, dims] of an operand whose product runs over dims: lanes have eight rows, and four parts of a warp's."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, dim] for dim in dims_in_thread] + [[row, 0] for row in (8, 16, 32) if row < rows],
        lane_bases=[[0, dim] for dim in dims_of_lanes] + [[1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, dim] for dim in dims_of_warps],
        block_bases=[],
        shape=[rows, 4 * dims_of_warps[0]],
    )


LATENT = ((1, 2, 4, 8, 16), (32, 64), (128, 256))
ROPED = ((1, 2), (4, 8), (16, 32))
QUERIES = gl.constexpr(along_dims(16, *LATENT))
QUERY_ROPES = gl.constexpr(along_dims(16, *ROPED))
KEYS = gl.constexpr(along_dims(64, *LATENT))
ROPES = gl.constexpr(along_dims(64, *ROPED))
VALUES = gl.constexpr(
    gl.DistributedLinearLayout(  # products run over keys
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 16], [0, 32], [0, 64]],
        warp_bases=[[0, 128], [0, 256]],
        block_bases=[],
        shape=[64, 512],
    )
)
# Of entries on their way to shared memory, and of their scales, a thread each.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
# Scores [BLOCKS, 16, 64]: a warp has all keys of four heads.
PARTS = gl.constexpr(gl.BlockedLayout([4, 1, 4], [1, 4, 8], [1, 4, 1], [2, 1, 0]))
HEADS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(0, PARTS.value)))
KEYS_S = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(0, PARTS.value)))
HEADS_O = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, DOTS.value)))


@gluon.jit
def copy_words(smem, entries, ok, OFFSET: gl.constexpr):
    """Words of each entry from byte OFFSET on their way to `smem` [64, words] i32, zeros where there is no key."""
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
    """Scales [64, BLOCKS], and which entries are valid."""
    _, scales, ok = entry_pointers(main, None, 0, 0, slot, C)
    ptrs = gl.expand_dims(scales.to(gl.pointer_type(gl.float32), bitcast=True), 1)
    ptrs += gl.expand_dims(gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, SCALES)), 0)
    return gl.load(ptrs, mask=gl.expand_dims(ok, 1), other=0.0), ok


@gluon.jit
def load_rows(q_row, head_block, START: gl.constexpr, DIMS: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """DIMS of each of a program's queries, in float32."""
    rows = head_block * H + gl.arange(0, H, layout=gl.SliceLayout(1, LAYOUT))
    dims = START + gl.arange(0, DIMS, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = gl.expand_dims(q_row + offset_of(rows, C.Q_STRIDE_H, C.HEADS), 1) + gl.expand_dims(dims, 0)
    return gl.load(ptrs, mask=gl.expand_dims(rows < C.HEADS, 1), other=0.0).to(gl.float32)


@gluon.jit
def latent_operand(x):
    """The dims of [rows, 512] as [BLOCKS, rows, 128], in the order in which threads hold them."""
    ROWS: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, (ROWS, BLOCKS, 4, 2, 4, 2, 2)), (1, 0, 3, 4, 5, 2, 6))
    return gl.reshape(x, (BLOCKS, ROWS, 128))


@gluon.jit
def rope_operand(x):
    """The dims of [rows, 64] as [BLOCKS, rows, 16], likewise."""
    ROWS: gl.constexpr = x.shape[0]
    return gl.reshape(gl.permute(gl.reshape(x, (ROWS, BLOCKS, 4, 2, 2)), (1, 0, 3, 2, 4)), (BLOCKS, ROWS, 16))


@gluon.jit
def left(x):
    return gl.convert_layout(x, LEFT, assert_trivial=True)


@gluon.jit
def right(x):
    return gl.convert_layout(x, RIGHT, assert_trivial=True)


@gluon.jit
def by_row(factor):
    """[H] beside [BLOCKS, H, …]."""
    return gl.expand_dims(gl.expand_dims(factor, 0), 2)


@gluon.jit
def attend_few_heads(main, tiles, task, C: gl.constexpr):
    SMEM_W: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SMEM_E: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    SMEM_H: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    SMEM_S: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    SMEM_V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SMEM_B: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    latent_smem = gl.allocate_shared_memory(gl.int32, [STAGES, N, 128], SMEM_W)
    rope_smem = gl.allocate_shared_memory(gl.int32, [STAGES, N, 32], SMEM_W)
    scale_smem = gl.allocate_shared_memory(gl.float32, [N, BLOCKS], SMEM_B)
    ratio_smem = gl.allocate_shared_memory(gl.float32, [N, BLOCKS], SMEM_B)  # scales over 2**exponent
    exponent_smem = gl.allocate_shared_memory(gl.int32, [N], SMEM_V)
    valid_smem = gl.allocate_shared_memory(gl.float32, [N], SMEM_V)  # −inf where there is no key, else the exponent
    parts_smem = gl.allocate_shared_memory(gl.float32, [BLOCKS, H, N], SMEM_S)
    p_smem = gl.allocate_shared_memory(gl.float32, [H, N], SMEM_H)
    factor_smem = gl.allocate_shared_memory(gl.float32, [H], SMEM_V)

    slots = ()
    for tile in gl.static_range(STAGES):
        slots += (load_slots(main, None, 0, tile, gl.SliceLayout(1, WORDS)),)
    scale_slot = load_slots(main, None, 0, 0, gl.SliceLayout(1, SCALES))
    # A warp has whole rows of queries here.
    q = load_rows(task.q_row, task.head_block, 0, 512, gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]), C)
    q_rope = load_rows(task.q_row, task.head_block, 512, 64, gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]), C)
    for tile in gl.static_range(STAGES):
        copy_entries(latent_smem.index(tile), rope_smem.index(tile), main, slots[tile], C)
        if tile == 0:
            scales, ok = load_scales(main, scale_slot, C)
            scale_slot = load_slots(main, None, 0, 1, gl.SliceLayout(1, SCALES))
    slot = load_slots(main, None, 0, STAGES, gl.SliceLayout(1, WORDS))

    # Queries divided by a power of two a row, through the memory of scores and P to the threads that multiply them.
    largest = gl.max(finite_abs(q_rope), 1)
    largest = gl.convert_layout(largest, gl.SliceLayout(1, q.type.layout), assert_trivial=True)
    q_exponent = exponent_of(gl.maximum(gl.max(finite_abs(q), 1), largest))
    divisor = power_of_two(-q_exponent)
    rope_divisor = gl.convert_layout(divisor, gl.SliceLayout(1, q_rope.type.layout), assert_trivial=True)
    q_smem = parts_smem.reinterpret(gl.float16, [H, 512], SMEM_H)
    q_rope_smem = p_smem.reinterpret(gl.bfloat16, [2 * H, 64], SMEM_H).slice(0, H, 0)
    q_smem.store((q * gl.expand_dims(divisor, 1)).to(gl.float16))
    q_rope_smem.store((q_rope * gl.expand_dims(rope_divisor, 1)).to(gl.bfloat16))
    factor_smem.store(power_of_two(q_exponent) * (C.SCALE * LOG2E))
    gl.barrier()
    queries = left(latent_operand(q_smem.load(QUERIES)))
    query_ropes = left(rope_operand(q_rope_smem.load(QUERY_ROPES)))
    scale = factor_smem.load(HEADS)

    maximum = gl.full([H], float("-inf"), gl.float32, HEADS)
    denominator = gl.zeros([H], gl.float32, HEADS)
    seen = gl.zeros([N], gl.int32, gl.SliceLayout(1, SCALES))  # whether there was a key in this row of any tile
    out = gl.zeros([BLOCKS, H, 128], gl.float32, DOTS)
    empty_scores = gl.zeros([BLOCKS, H, N], gl.float32, DOTS)
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

        # Scores of each block of dims, then of all.
        entries = latent_smem.index(stage).reinterpret(gl.float8e4nv, [N, 512], SMEM_E)
        keys = right(gl.permute(latent_operand(entries.load(KEYS).to(gl.float16)), (0, 2, 1)))
        parts = mma_v2(queries, keys, empty_scores)
        parts *= gl.expand_dims(scale_smem.permute((1, 0)).load(gl.SliceLayout(1, DOTS)), 1)
        ropes = rope_smem.index(stage).reinterpret(gl.bfloat16, [N, 64], SMEM_H).load(ROPES)
        parts_smem.store(mma_v2(query_ropes, right(gl.permute(rope_operand(ropes), (0, 2, 1))), parts))
        gl.barrier()
        scores = gl.sum(parts_smem.load(PARTS), 0) * gl.expand_dims(scale, 1)
        scores += gl.expand_dims(valid_smem.load(KEYS_S), 0)
        new_maximum = gl.maximum(maximum, gl.max(scores, 1))
        # Without a valid key so far the maximum is −inf; −inf − −inf would be NaN.
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = gl.exp2(scores - gl.expand_dims(base, 1))
        rescale = gl.exp2(maximum - base)
        shares = p * gl.expand_dims(power_of_two(-exponent_smem.load(KEYS_S)), 0)
        denominator = denominator * rescale + gl.sum(shares, 1)
        maximum = new_maximum
        p_smem.store(p)
        factor_smem.store(rescale)
        gl.barrier()

        # Every warp weighs its own dims.
        weights = gl.expand_dims(p_smem.load(gl.SliceLayout(0, LEFT)), 0)
        weights *= gl.expand_dims(ratio_smem.permute((1, 0)).load(gl.SliceLayout(1, LEFT)), 1)
        values = gl.reshape(entries.load(VALUES).to(gl.float16), (N, BLOCKS, 8, 16))
        values = right(gl.reshape(gl.permute(values, (1, 0, 3, 2)), (BLOCKS, N, 128)))
        out = mma_v2(weights.to(gl.float16), values, out * by_row(factor_smem.load(HEADS_O)))
        gl.barrier()
        copy_entries(latent_smem.index(stage), rope_smem.index(stage), main, slot, C)
        slot = load_slots(main, None, 0, tile + STAGES + 1, gl.SliceLayout(1, WORDS))
    async_copy.wait_group(0)

    rows = task.head_block * H + gl.arange(0, H, layout=HEADS)
    inverse, lse = close_sums(maximum, denominator, gl.max(seen, 0), rows, task, C)
    gl.store(task.lse_row + rows, lse, mask=rows < C.HEADS)
    share = by_row(gl.convert_layout(inverse, HEADS_O))
    out = gl.where(share < 0.0, 0.0, out * share).to(task.out_row.dtype.element_ty)
    out = gl.reshape(gl.permute(gl.reshape(out, (BLOCKS, H, 16, 8)), (1, 0, 3, 2)), (H, 512))
    out = gl.convert_layout(out, QUERIES, assert_trivial=True)  # 16 neighbouring dims a thread
    rows = task.head_block * H + gl.arange(0, H, layout=gl.SliceLayout(1, QUERIES))
    dims = gl.arange(0, 512, layout=gl.SliceLayout(0, QUERIES))
    ptrs = task.out_row + gl.expand_dims(offset_of(rows, 512, C.HEADS), 1) + gl.expand_dims(dims, 0)
    gl.store(ptrs, out, mask=gl.expand_dims(rows < C.HEADS, 1))
