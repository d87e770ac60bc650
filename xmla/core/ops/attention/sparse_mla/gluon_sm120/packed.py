"""Attention on SM12x over e4m3 entries: their bytes stay in shared memory until they are operands.

e4m3 converts to float16 without a multiplication, as in Hopper's tile of few heads: scales multiply scores, and P
before its product with values. Two warps of each group have its 128 dims, V3.2's of one scale, V4's of two, whose
products are scaled apart. They divide the keys of Q·Kᵀ and the dims of P·V, a tile of 64 each: for either product each
byte is read and converted once. The dims are permuted so that a thread reads 16 adjacent bytes of keys, and 8 of
values. V4's roped dims, which are values too, are a product of their own beside either.

Scores are a tile ahead, so that their products hide the softmax. The warps keep in step, with a barrier after each row:

    tile t    copies of t + 2 start, to where t − 1 was; each warp Q·Kᵀ of t + 1; scales of t + 1 → their powers of two
              and what is left of them; sum of the groups' parts of t, softmax → P, factor
              parts of t + 1 → shared memory; each warp P·V of t

See benchmarks/log/sm12x.md.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import ROPE_DIMS, VALUE_DIMS, close_sums, load_slots
from xmla.core.ops.attention.sparse_mla.gluon_sm90.conversion import exponent_of, finite_abs, small_float
from xmla.core.ops.attention.sparse_mla.gluon_sm120.common import (
    BLOCK_N,
    GROUP_DIMS,
    GROUPS,
    ROWS,
    SMEM_DENSE,
    SMEM_HALVES,
    SMEM_P,
    SMEM_PARTS,
    SMEM_VECTOR,
    SMEM_WORDS,
    Copied,
    by_row,
    copy_tile,
    over_powers,
    rope_is_apart,
    rotate_back,
    scale_words,
    summands,
)

STAGES = gl.constexpr(3)  # tiles of entries in shared memory
TILES = gl.constexpr(8)  # of an entry's values, a warp's each
TILE_DIMS = gl.constexpr(VALUE_DIMS.value // TILES.value)

# Scores [GROUPS, BLOCK_H, BLOCK_N] of the operands LEFT and RIGHT: the two warps of a group divide the keys.
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 2], instr_shape=[1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SCORES.value, 2))
# Sums of values [TILES, BLOCK_H, TILE_DIMS] of the operands WEIGHTS and VALUES.
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
VALUES = gl.constexpr(gl.DotOperandLayout(1, SUMS.value, 2))
HEADS_O = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, SUMS.value)))
# Sums of roped values [BLOCK_H, ROPE_DIMS].
ROPED = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 8], instr_shape=[16, 8]))
# Words of values: a thread has two of a key and of the next one.
VALUE_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [8, 0], [16, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32], [0, 64]],
        block_bases=[],
        shape=[BLOCK_N.value, VALUE_DIMS.value // 4],
    )
)
QUERY_ROPES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0]))  # [BLOCK_N, GROUPS]: a thread has one
SCALE_BYTES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0]))  # [BLOCK_N, TILES]: likewise
SMEM_BY_TILE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))


def entries_of(unit):
    """Shared memory of entries [BLOCK_N, VALUE_DIMS / unit], in elements of `unit` bytes.

    Where 16 bytes are depends on the key: lanes that are served at once are in different banks, whether they read keys
    or values, of either format.
    """
    dims = [[0, 1 << bit] for bit in range(VALUE_DIMS.value.bit_length() - unit.bit_length())]
    keys = [[1, 80 // unit], [2, 32 // unit], [4, 64 // unit], [8, 0], [16, 0]]
    return gl.SharedLinearLayout(offset_bases=dims + keys)


SMEM_ENTRIES = gl.constexpr(entries_of(4))
SMEM_CODES = gl.constexpr(entries_of(1))


class Tile(NamedTuple):
    """What warps tell each other of a tile; of the first three there are two, since scores are a tile ahead."""

    ratios: Any  # [2, BLOCK_N, TILES] f16: scales over 2**exponent
    exponents: Any  # [2, BLOCK_N] f32, −inf if the key is invalid
    inverses: Any  # [2, BLOCK_N] f32: 2**−exponent
    parts: Any  # [GROUPS, BLOCK_H, BLOCK_N] f32: the groups' parts of scores
    p: Any  # [BLOCK_H, BLOCK_N] f16
    shares: Any  # [BLOCK_H, BLOCK_N] bf16: P itself, of roped values
    factor: Any  # [BLOCK_H] f32: of what was summed before


@gluon.constexpr_function
def along_dims(rows, tile, of_heads):
    """Registers of an operand [rows, VALUE_DIMS] of products over dims: quarters of the tiles that share a scale.

    The two warps of a group have the same heads, but each half of the keys.
    """
    part = tile // 4
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << bit] for bit in range(part.bit_length() - 1)]
        + ([[0, tile]] if tile < GROUP_DIMS.value else [])
        + [[row, 0] for row in ((8, 16) if of_heads else (16,)) if row < rows],
        lane_bases=[[0, part], [0, 2 * part], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0] if of_heads else [8, 0], [0, 128], [0, 256]],
        block_bases=[],
        shape=[rows, VALUE_DIMS.value],
    )


@gluon.constexpr_function
def results(rows):
    """Registers of results [rows, VALUE_DIMS]: 16 adjacent dims a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]] + [[row, 0] for row in (8, 16) if row < rows],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 64], [0, 128], [0, 256]],
        block_bases=[],
        shape=[rows, VALUE_DIMS.value],
    )


@gluon.jit
def load_queries(task, FIRST: gl.constexpr, END: gl.constexpr, DIMS: gl.constexpr, LAYOUT: gl.constexpr,
                 C: gl.constexpr):  # fmt: skip
    """DIMS of each of the CTA's queries from FIRST on, in float32; zeros from END on."""
    BLOCK_H: gl.constexpr = C.BLOCK_H
    rows = task.head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LAYOUT))
    dims = FIRST + gl.arange(0, DIMS, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = gl.expand_dims(task.q_row + offset_of(rows, C.Q_STRIDE_H, C.HEADS), 1) + gl.expand_dims(dims, 0)
    mask = gl.expand_dims(rows < C.HEADS, 1) & gl.expand_dims(dims < END, 0)
    return gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def operand(x):
    """x [rows, GROUPS, dims] as [GROUPS, rows, dims], with the dims in the order in which threads hold them."""
    N: gl.constexpr = x.shape[0]
    DIMS: gl.constexpr = x.shape[2]
    x = gl.permute(gl.reshape(x, (N, GROUPS, 4, DIMS // 16, 2, 2)), (1, 0, 3, 4, 2, 5))
    return gl.reshape(x, (GROUPS, N, DIMS))


@gluon.jit
def operands(x, TILE: gl.constexpr):
    """The groups' tiles of x [rows, VALUE_DIMS], which have a scale each, as operands: one or two."""
    N: gl.constexpr = x.shape[0]
    if TILE == GROUP_DIMS:
        return operand(gl.reshape(x, (N, GROUPS, TILE))), None
    else:
        first, second = gl.split(gl.permute(gl.reshape(x, (N, GROUPS, 2, TILE)), (0, 1, 3, 2)))
        return operand(first), operand(second)


@gluon.jit
def value_operand(words):
    """float16 [TILES, BLOCK_N, TILE_DIMS] of e4m3 words [BLOCK_N, VALUE_DIMS / 4], likewise.

    A register has two keys. Bytes are paired before they are converted, which takes half of the permutations.
    """
    even, odd = gl.split(gl.permute(gl.reshape(words, (BLOCK_N // 2, 2, VALUE_DIMS // 4)), (0, 2, 1)))
    first, second, third, fourth = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b, c, d;
        .reg .b32 x, y;
        prmt.b32 x, $4, $5, 0x5140;
        prmt.b32 y, $4, $5, 0x7362;
        mov.b32 {a, b}, x;
        mov.b32 {c, d}, y;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        cvt.rn.f16x2.e4m3x2 $2, c;
        cvt.rn.f16x2.e4m3x2 $3, d;
        }
        """,
        "=r,=r,=r,=r,r,r", [even, odd], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.join(gl.join(first, third), gl.join(second, fourth))  # [BLOCK_N / 2, words, 2, 2]
    low = pairs.to(gl.int16).to(gl.float16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    x = gl.reshape(gl.join(low, high), (BLOCK_N // 2, TILES, 8, 8, 2))
    return gl.reshape(gl.permute(x, (1, 0, 4, 3, 2)), (TILES, BLOCK_N, TILE_DIMS))


@gluon.jit
def left(x):
    return gl.convert_layout(x, LEFT, assert_trivial=True)


@gluon.jit
def right(x):
    return gl.convert_layout(x, RIGHT, assert_trivial=True)


@gluon.jit
def key_scales(copied, stage, TILE: gl.constexpr, C: gl.constexpr):
    """The scales [GROUPS, 1, BLOCK_N] f32 of the groups' first tile (0) or second (1)."""
    KEYS: gl.constexpr = gl.SliceLayout(1, SCORES)
    if C.LAYOUT.scale == "float32":
        scales = copied.scales.index(stage).reinterpret(gl.float32, [BLOCK_N, GROUPS], SMEM_DENSE)
        return gl.expand_dims(scales.permute((1, 0)).load(KEYS), 1)
    else:
        pairs = copied.scales.index(stage).reinterpret(gl.uint16, [BLOCK_N, GROUPS], SMEM_DENSE).permute((1, 0))
        byte = (pairs.load(KEYS).to(gl.int32) >> 8 * TILE) & 0xFF
        # NaN is told with the exponents; the last byte of an entry is no scale, but zeros are multiplied by it.
        bits = gl.maximum(gl.minimum(byte, 254) << 23, 0x00400000)
        return gl.expand_dims(bits.to(gl.float32, bitcast=True), 1)


@gluon.jit
def of_groups(rows):
    """Roped dims [rows, ROPE_DIMS] in shared memory as [GROUPS, rows, ROPE_DIMS / GROUPS]."""
    return rows.reshape((rows.shape[0], GROUPS, ROPE_DIMS // GROUPS)).permute((1, 0, 2))


@gluon.jit
def scores_of(copied, stage, q, second_q, q_rope, C: gl.constexpr):
    """The groups' parts of a tile's scores [GROUPS, BLOCK_H, BLOCK_N]."""
    BLOCK_H: gl.constexpr = C.BLOCK_H
    entries = copied.latent.index(stage).reinterpret(gl.float8e4nv, [BLOCK_N, VALUE_DIMS], SMEM_CODES)
    keys = entries.load(along_dims(BLOCK_N, C.LAYOUT.tile, False)).to(gl.float16)
    first, second = operands(keys, C.LAYOUT.tile)
    no_scores = gl.zeros([GROUPS, BLOCK_H, BLOCK_N], gl.float32, SCORES)
    parts = mma_v2(q, right(gl.permute(first, (0, 2, 1))), no_scores) * key_scales(copied, stage, 0, C)
    if second is not None:
        parts += mma_v2(second_q, right(gl.permute(second, (0, 2, 1))), no_scores) * key_scales(copied, stage, 1, C)
    if rope_is_apart(C.LAYOUT):
        rows = copied.rope.index(stage).reinterpret(gl.bfloat16, [BLOCK_N, ROPE_DIMS], SMEM_HALVES)
        parts = mma_v2(of_groups(q_rope).load(LEFT), of_groups(rows).permute((0, 2, 1)).load(RIGHT), parts)
    return parts


@gluon.jit
def divide_scales(copied, stage, shared, parity, C: gl.constexpr):
    """Note powers of two of a tile's scales, and the scales over these; which keys are valid."""
    if C.LAYOUT.scale == "float32":
        scales = copied.scales.index(stage).reinterpret(gl.float32, [BLOCK_N, GROUPS], SMEM_DENSE).load(SCALES)
        exponent = exponent_of(gl.max(finite_abs(scales), 1))
        told = small_float(exponent)
        inverse = power_of_two(-exponent)
        ratios = (scales * gl.expand_dims(inverse, 1)).to(gl.float16)
        ratios = gl.reshape(gl.join(ratios, ratios), (BLOCK_N, TILES))
    else:
        stored = copied.scales.index(stage).reinterpret(gl.uint8, [BLOCK_N, TILES], SMEM_DENSE).load(SCALE_BYTES)
        tile = gl.expand_dims(gl.arange(0, TILES, layout=gl.SliceLayout(0, SCALE_BYTES)), 0)
        stored = gl.where(tile < C.LAYOUT.scales, stored.to(gl.int32), 0)
        greatest = gl.max(stored, 1)
        exponent = gl.minimum(gl.maximum(greatest - 127, -100), 112)
        told = gl.where(greatest == 255, float("nan"), small_float(exponent))
        inverse = power_of_two(-exponent)
        over = gl.maximum(gl.minimum(stored - 127 - gl.expand_dims(exponent, 1), 15), -126)
        ratios = power_of_two(over).to(gl.float16)
    valid = copied.valid.index(stage).load(exponent.type.layout)
    shared.ratios.index(parity).store(ratios)
    shared.exponents.index(parity).store(gl.where(valid != 0, told, float("-inf")))
    shared.inverses.index(parity).store(inverse)
    return valid


@gluon.jit
def softmax(shared, parity, maximum, denominator, scale, PARTS: gl.constexpr, C: gl.constexpr):
    """Store a tile's P, times powers of two, and the factor of what was summed before; the new maximum and sum."""
    KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, PARTS))
    scores = gl.sum(shared.parts.load(PARTS), 0) * gl.expand_dims(scale, 1)
    scores += gl.expand_dims(shared.exponents.index(parity).load(KEYS), 0)
    new_maximum = gl.maximum(maximum, gl.max(scores, 1))
    # Before the first valid key the maximum is −inf, and −inf − −inf would be NaN.
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(scores - gl.expand_dims(base, 1))
    rescale = gl.exp2(maximum - base)
    shared.p.store(p.to(gl.float16))
    shared.factor.store(rescale)
    shares = p * gl.expand_dims(shared.inverses.index(parity).load(KEYS), 0)
    if C.LAYOUT.rope_in_value:
        shared.shares.store(shares.to(gl.bfloat16))
    return new_maximum, denominator * rescale + gl.sum(shares, 1)


@gluon.jit
def weigh(copied, stage, shared, parity, out, roped, C: gl.constexpr):
    """`out` [TILES, BLOCK_H, TILE_DIMS] and `roped` [BLOCK_H, ROPE_DIMS] times their factor, and a tile's P·V."""
    ratios = shared.ratios.index(parity).permute((1, 0)).load(gl.SliceLayout(1, WEIGHTS))
    weights = gl.expand_dims(shared.p.load(gl.SliceLayout(0, WEIGHTS)), 0) * gl.expand_dims(ratios, 1)
    values = gl.convert_layout(value_operand(copied.latent.index(stage).load(VALUE_WORDS)), VALUES, assert_trivial=True)
    out = mma_v2(weights, values, out * by_row(shared.factor.load(HEADS_O)))
    if C.LAYOUT.rope_in_value:
        rows = copied.rope.index(stage).reinterpret(gl.bfloat16, [BLOCK_N, ROPE_DIMS], SMEM_HALVES)
        factor = gl.expand_dims(shared.factor.load(gl.SliceLayout(1, ROPED)), 1)
        shares = shared.shares.load(gl.DotOperandLayout(0, ROPED, 2))
        roped = mma_v2(shares, rows.load(gl.DotOperandLayout(1, ROPED, 2)), roped * factor)
    return out, roped


@gluon.jit
def attend_packed(main, extra, main_tiles, tiles, task, C: gl.constexpr):
    """Attention of BLOCK_H heads of a token over packed entries."""
    BLOCK_H: gl.constexpr = C.BLOCK_H
    LAYOUT: gl.constexpr = C.LAYOUT
    PARTS: gl.constexpr = summands(BLOCK_H)
    HEADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, PARTS))

    latent = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, VALUE_DIMS // 4], SMEM_ENTRIES)
    rope = latent
    if rope_is_apart(LAYOUT):
        rope = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, ROPE_DIMS // 2], SMEM_WORDS)
    copied = Copied(
        latent,
        rope,
        gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, scale_words(LAYOUT)], SMEM_DENSE),
        gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], SMEM_VECTOR),
    )
    p_smem = gl.allocate_shared_memory(gl.float16, [BLOCK_H, BLOCK_N], SMEM_P)
    shares_smem = p_smem
    if LAYOUT.rope_in_value:
        shares_smem = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, BLOCK_N], SMEM_P)
    shared = Tile(
        gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, TILES], SMEM_BY_TILE),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], SMEM_VECTOR),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_N], SMEM_VECTOR),
        gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_H, BLOCK_N], SMEM_PARTS),
        p_smem,
        shares_smem,
        gl.allocate_shared_memory(gl.float32, [BLOCK_H], SMEM_VECTOR),
    )

    slot = load_slots(main, extra, main_tiles, 0, ROWS, BLOCK_N)
    for tile in gl.static_range(STAGES - 1):
        copy_tile(copied, tile, main, extra, main_tiles, tile, slot, C)
        slot = load_slots(main, extra, main_tiles, tile + 1, ROWS, BLOCK_N)

    # Each query is divided by a power of two.
    q = load_queries(task, 0, LAYOUT.quantized, VALUE_DIMS, along_dims(BLOCK_H, LAYOUT.tile, True), C)
    largest = gl.max(finite_abs(q), 1)
    if rope_is_apart(LAYOUT):
        roped_q = load_queries(task, LAYOUT.quantized, LAYOUT.dims, ROPE_DIMS, QUERY_ROPES, C)
        largest = gl.maximum(largest, gl.convert_layout(gl.max(finite_abs(roped_q), 1), largest.type.layout))
    exponent = exponent_of(largest)
    divisor = power_of_two(-exponent)
    q, second_q = operands((q * gl.expand_dims(divisor, 1)).to(gl.float16), LAYOUT.tile)
    q = left(q)
    if second_q is not None:
        second_q = left(second_q)
    q_rope = p_smem
    if rope_is_apart(LAYOUT):
        divisor = gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(1, QUERY_ROPES)), 1)
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, ROPE_DIMS], SMEM_HALVES)
        q_rope.store((roped_q * divisor).to(gl.bfloat16))
    scale = gl.convert_layout(power_of_two(exponent) * (C.SCALE * LOG2E), HEADS)

    maximum = gl.full([BLOCK_H], float("-inf"), gl.float32, HEADS)
    denominator = gl.zeros([BLOCK_H], gl.float32, HEADS)
    out = gl.zeros([TILES, BLOCK_H, TILE_DIMS], gl.float32, SUMS)
    roped = gl.zeros([BLOCK_H, ROPE_DIMS], gl.float32, ROPED)
    async_copy.wait_group(STAGES - 2)
    gl.barrier()
    shared.parts.store(scores_of(copied, 0, q, second_q, q_rope, C))
    seen = divide_scales(copied, 0, shared, 0, C)  # whether any tile had a key in this row
    for tile in range(0, tiles - 1):
        ahead = (tile + 1) % STAGES
        async_copy.wait_group(0)
        gl.barrier()
        copy_tile(copied, (tile + 2) % STAGES, main, extra, main_tiles, tile + 2, slot, C)
        slot = load_slots(main, extra, main_tiles, tile + 3, ROWS, BLOCK_N)
        parts = scores_of(copied, ahead, q, second_q, q_rope, C)
        seen |= divide_scales(copied, ahead, shared, (tile + 1) % 2, C)
        maximum, denominator = softmax(shared, tile % 2, maximum, denominator, scale, PARTS, C)
        gl.barrier()
        shared.parts.store(parts)
        out, roped = weigh(copied, tile % STAGES, shared, tile % 2, out, roped, C)
    last = gl.maximum(tiles - 1, 0)
    gl.barrier()
    maximum, denominator = softmax(shared, last % 2, maximum, denominator, scale, PARTS, C)
    gl.barrier()
    out, roped = weigh(copied, last % STAGES, shared, last % 2, out, roped, C)
    async_copy.wait_group(0)

    rows = task.head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=HEADS)
    inverse, lse = close_sums(maximum, denominator, gl.max(seen, 0), rows, task, C)
    gl.store(task.lse_row + rows, lse, mask=rows < C.HEADS)
    # The dims of a tile in their order again: eight adjacent ones a thread.
    out = gl.reshape(gl.permute(gl.reshape(out, (TILES, BLOCK_H, 8, 8)), (0, 1, 3, 2)), (TILES, BLOCK_H, TILE_DIMS))
    if LAYOUT.rope_in_value:
        number = gl.arange(0, TILES, layout=gl.SliceLayout(1, gl.SliceLayout(2, out.type.layout)))
        is_rope = gl.expand_dims(gl.expand_dims(number, 1), 2) == TILES - 1
        roped = gl.convert_layout(roped, gl.SliceLayout(0, out.type.layout))
        out = gl.where(is_rope, gl.expand_dims(roped, 0), out)
    out = gl.reshape(gl.permute(out, (1, 0, 2)), (BLOCK_H, GROUPS, GROUP_DIMS))
    out = gl.permute(out, (1, 0, 2))
    share = by_row(gl.convert_layout(inverse, gl.SliceLayout(0, gl.SliceLayout(2, out.type.layout))))
    out = out * share
    if C.SPLIT:
        out = over_powers(out, task, C)
    out = gl.reshape(gl.permute(gl.where(share < 0.0, 0.0, out), (1, 0, 2)), (BLOCK_H, VALUE_DIMS))
    if task.rotation is not None:
        out = rotate_back(out, task.rotation, C.EPILOGUE.ROPE)
    out = gl.convert_layout(out.to(task.out_row.dtype.element_ty), results(BLOCK_H), assert_trivial=True)
    rows = task.head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, out.type.layout))
    dims = gl.arange(0, VALUE_DIMS, layout=gl.SliceLayout(0, out.type.layout))
    ptrs = task.out_row + gl.expand_dims(offset_of(rows, VALUE_DIMS, C.HEADS), 1) + gl.expand_dims(dims, 0)
    gl.store(ptrs, out, mask=gl.expand_dims(rows < C.HEADS, 1))
