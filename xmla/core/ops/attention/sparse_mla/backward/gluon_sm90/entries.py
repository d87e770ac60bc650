"""Entries' gradients of few heads on Hopper, in Gluon: the summands of a few tokens are added at once.

A CTA has a group of tokens, a part of the dims, and all entries that the group names (merge.py), a tile at a time. From
P and dS, which queries.py has kept, it computes qᵀ·dS + doutᵀ·P of each token by itself, as if it were alone: where a
token does not name an entry, P and dS are zeros, and a NaN of its q or dout becomes the integer 0. Each token's summand
is rounded to an integer, so that their sum has no order, and is added in the L2 cache once for all.
"""

from triton import language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.common import (
    PIECE_DIMS,
    VALUE_PIECES,
    against,
    columns_of,
    rows_of,
)
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.merge import TOKENS as _TOKENS
from xmla.core.ops.attention.sparse_mla.backward.kernels import WORDS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import copy_columns

TOKENS = gl.constexpr(_TOKENS.value)
TILE_KEYS = gl.constexpr(32)
STAGES = gl.constexpr(3)  # of P and dS
FACTOR_ROWS = gl.constexpr(TOKENS.value * TILE_KEYS.value)  # of P and of dS: the tile's keys of each token
PIECE_LAYOUT = gl.constexpr(against.fn(TILE_KEYS.value))
ADDED = gl.constexpr(8)  # elements of a thread that are added by one piece of PTX
OPERANDS = gl.constexpr(
    ",".join(
        ["=&r"] * (ADDED.value // 4) + [kind for kind in "lr" + "f" * TOKENS.value + "rr" for _ in range(ADDED.value)]
    )
)


@gluon.constexpr_function
def additions(dims):
    """PTX that adds elements of all tokens' pieces to sums of so many dims, in parts as by `lang.sums.parts_of`.

    Element i has key i % 2 + i // 4 · 8 and dim i // 2 % 2 · 8 from the thread's first. Operands: an unused result,
    pointers to the low words of the thread's two dims, of the first entry, the first dim, x of each token, and of each
    key its unit and place. Tokens' integers are added to the low words as one, the second dim's times 2**32; where any
    has a high part, which is seldom, low and high parts are added apart.
    """
    count, tokens = ADDED.value, TOKENS.value
    skipped = count // 4
    low, dim, *x, unit, place = (
        [f"${skipped + operand * count + i}" for i in range(count)] for operand in range(4 + tokens)
    )
    row = 4 * WORDS.value * dims  # bytes
    lines = [".reg .pred more, high;", f".reg .b32 t, s, bits, low<2>, x<{tokens * count}>;"]
    lines += [".reg .f32 z, u, limit, most;", ".reg .b64 wide, sum, both, high<2>;", "setp.ne.b32 more, 0, 0;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(skipped)]
    keys = [i for i in range(count) if i % 4 < 2]
    for i in keys:
        lines += [f"and.b32 s, {unit[i]}, 0xff800000;", "mov.b32 u, s;", "mov.b32 most, 0;"]
        for element in (i, i + 2):
            for token in range(tokens):
                lines += [f"fma.rn.f32 z, {x[token][element]}, u, 0f3F000000;"]
                lines += [f"cvt.rmi.s32.f32 x{token * count + element}, z;", "abs.f32 z, z;", "add.f32 most, most, z;"]
        # High parts are 0 if all |z| together are below 2**(bits − 1); where one is NaN they may be anything.
        lines += [f"shl.b32 s, {unit[i]}, 23;", "add.s32 s, s, 0x3f000000;", "mov.b32 limit, s;"]
        lines += ["setp.geu.or.f32 more, most, limit, more;"]
    for i in keys:
        for half in range(2):
            first, *others = (f"x{token * count + i + 2 * half}" for token in range(tokens))
            lines += [f"mov.b32 low{half}, {first};", *(f"add.s32 low{half}, low{half}, {each};" for each in others)]
        lines += ["shr.s32 s, low0, 31;", "add.s32 s, s, low1;", "mov.b64 both, {low0, s};"]
        lines += [f"mad.wide.s32 sum, {place[i]}, {row}, {low[0]};"]
        lines += ["@!more red.relaxed.gpu.global.add.u64 [sum], both;"]
    lines += ["@!more bra done;"]
    for i in keys:
        lines += [f"and.b32 bits, {unit[i]}, 63;", "add.s32 s, bits, -1;", "shl.b32 s, 1, s;"]
        for half in range(2):
            lines += [f"mov.b32 low{half}, 0;", f"mov.b64 high{half}, 0;"]
            for token in range(tokens):
                part = f"x{token * count + i + 2 * half}"
                lines += [f"add.s32 t, s, {part};", "shr.s32 t, t, bits;", "cvt.s64.s32 wide, t;"]
                lines += [f"add.s64 high{half}, high{half}, wide;", "shl.b32 t, t, bits;", "neg.s32 t, t;"]
                lines += [f"add.s32 t, t, {part};", f"add.s32 low{half}, low{half}, t;"]
        lines += ["shr.s32 s, low0, 31;", "add.s32 s, s, low1;", "mov.b64 both, {low0, s};"]
        lines += [f"mad.wide.s32 sum, {place[i]}, {row}, {low[0]};", "red.relaxed.gpu.global.add.u64 [sum], both;"]
        # From the thread's low words to its first dim's high words.
        lines += [f"and.b32 s, {dim[0]}, -16;", "mad.wide.u32 sum, s, 4, sum;"]
        for half in range(2):
            lines += [f"setp.ne.b64 high, high{half}, 0;"]
            lines += [f"@high red.relaxed.gpu.global.add.u64 [sum + {4 * dims + 64 * half}], high{half};"]
    return "\n".join(["{", *lines, "done:", "}"])


@gluon.jit
def add_piece(acc0, acc1, acc2, acc3, piece, unit, place, sums_ptr, C: gl.constexpr):
    """Add a piece of dims of all tokens to the sums of a tile's entries, PAIRED as `kernels.load_sums` describes."""
    offs_d = gl.arange(0, PIECE_DIMS, layout=gl.SliceLayout(1, PIECE_LAYOUT))
    dim = piece * PIECE_DIMS + offs_d // 16 * 16 + offs_d % 8
    low = gl.expand_dims((sums_ptr + dim + offs_d % 8).to(gl.uint64, bitcast=True), 1)
    gl.inline_asm_elementwise(
        additions(C.LAYOUT.dims),
        OPERANDS,
        [low, gl.expand_dims(dim, 1), acc0, acc1, acc2, acc3, gl.expand_dims(unit, 0),
         gl.expand_dims(place, 0)],
        dtype=gl.int8,
        is_pure=False,
        pack=ADDED,
    )  # fmt: skip


@gluon.jit
def load_ranks(ranks, tile, end, most_merged, LAYOUT: gl.constexpr):
    """Ranks [FACTOR_ROWS] of a tile's entries among each token's slots, −1 for none."""
    row = gl.arange(0, FACTOR_ROWS, layout=LAYOUT)
    key = tile * TILE_KEYS + row % TILE_KEYS
    return gl.load(ranks + offset_of(row // TILE_KEYS, most_merged) + key, mask=key < end, other=-1)


@gluon.jit
def copy_factors(factors_ptr, rank, num_keys, stage, p, ds, C: gl.constexpr):
    """Start copies of a tile's P and dS, zeros for tokens that do not name the entry."""
    ROWS: gl.constexpr = rank.type.layout
    HEADS: gl.constexpr = C.SUMMED_HEADS
    token = gl.arange(0, FACTOR_ROWS, layout=ROWS) // TILE_KEYS
    rows = factors_ptr + (offset_of(token, num_keys) + rank) * (2 * HEADS)
    copy_columns(rows, rank >= 0, p.index(stage), 0)
    copy_columns(rows, rank >= 0, ds.index(stage), HEADS)
    async_copy.commit_group()


@gluon.jit
def load_targets(places, units, tile, end, num_slots):
    """The entries of a tile and the units of their sums; past the last, entries that differ, to which 0 is added."""
    key = tile * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, PIECE_LAYOUT))
    ok = key < end
    unit = gl.load(units + key, mask=ok, other=1)
    return gl.where(ok, gl.load(places + key, mask=ok, other=0), key % num_slots), unit


@gluon.jit
def multiply(q, dout, p, ds, TOKEN: gl.constexpr, empty, C: gl.constexpr):
    """Start qᵀ·dS + doutᵀ·P of a token, [PIECE_DIMS, TILE_KEYS]."""
    HEADS: gl.constexpr = C.SUMMED_HEADS
    q = q.slice(TOKEN * HEADS, HEADS, 0).permute((1, 0))
    dout = dout.slice(TOKEN * HEADS, HEADS, 0).permute((1, 0))
    p = p.slice(TOKEN * TILE_KEYS, TILE_KEYS, 0).permute((1, 0))
    ds = ds.slice(TOKEN * TILE_KEYS, TILE_KEYS, 0).permute((1, 0))
    acc = warpgroup_mma(q, ds, empty, use_acc=False, is_async=True)
    return warpgroup_mma(dout, p, acc, is_async=True)


@gluon.jit
def sparse_mla_backward_dcache_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    dout_ptr,  # [T, H, LANES]
    factors_ptr,  # [tokens of a launch, K, 2, SUMMED_HEADS]: P and dS
    places_ptr,  # [groups, TOKENS·K] i32, as `merge_slots_kernel` says
    units_ptr,  # [groups, TOKENS·K] i32
    ranks_ptr,  # [groups, TOKENS, TOKENS·K] i32
    merged_ends_ptr,  # [groups] i32
    num_slots,
    num_keys,  # K
    num_tokens,  # T
    first_token,
    sums_ptr,  # [P, R, WORDS·ROW] i32
    C: gl.constexpr,  # MergedEntries
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    HEADS: gl.constexpr = C.SUMMED_HEADS
    PIECES: gl.constexpr = C.PART_PIECES
    ROWS: gl.constexpr = gl.SliceLayout(1, rows_of(PIECE_DIMS))
    FACTORS: gl.constexpr = gl.SliceLayout(1, rows_of(HEADS))
    ROW: gl.constexpr = columns_of(PIECE_DIMS)
    group = (gl.program_id(0) // C.PARTS).to(gl.int64)
    first_piece = gl.program_id(0) % C.PARTS * PIECES
    token = first_token + group * TOKENS
    most_merged = TOKENS * num_keys.to(gl.int64)
    places, units = places_ptr + offset_of(group, most_merged), units_ptr + offset_of(group, most_merged)
    ranks = ranks_ptr + offset_of(group * TOKENS, most_merged)
    factors = factors_ptr + offset_of(group * TOKENS, num_keys) * (2 * HEADS)
    end = gl.load(merged_ends_ptr + group)
    tiles = gl.cdiv(end, TILE_KEYS)
    q = gl.allocate_shared_memory(DTYPE, [PIECES, TOKENS * HEADS, PIECE_DIMS], ROW)
    dout = gl.allocate_shared_memory(DTYPE, [PIECES, TOKENS * HEADS, PIECE_DIMS], ROW)
    p = gl.allocate_shared_memory(DTYPE, [STAGES, FACTOR_ROWS, HEADS], columns_of(HEADS))
    ds = gl.allocate_shared_memory(DTYPE, [STAGES, FACTOR_ROWS, HEADS], columns_of(HEADS))

    row = gl.arange(0, TOKENS * HEADS, layout=ROWS)
    number, head = row // HEADS, row % HEADS
    ok = (token + number < num_tokens) & (head < C.HEADS)
    q_row = q_ptr + offset_of(token, C.Q_STRIDE_T) + first_piece * PIECE_DIMS
    q_row += offset_of(number, C.Q_STRIDE_T, TOKENS) + offset_of(head, C.Q_STRIDE_H, C.HEADS)
    dout_row = dout_ptr + offset_of(token, C.DOUT_STRIDE_T) + first_piece * PIECE_DIMS
    dout_row += offset_of(number, C.DOUT_STRIDE_T, TOKENS) + offset_of(head, C.DOUT_STRIDE_H, C.HEADS)
    for piece in gl.static_range(PIECES):
        copy_columns(q_row, ok, q.index(piece), piece * PIECE_DIMS)
        copy_columns(dout_row, ok & (first_piece + piece < VALUE_PIECES), dout.index(piece), piece * PIECE_DIMS)
    for first in gl.static_range(STAGES - 1):
        copy_factors(factors, load_ranks(ranks, first, end, most_merged, FACTORS), num_keys, first, p, ds, C)
    rank = load_ranks(ranks, STAGES - 1, end, most_merged, FACTORS)
    next_place, next_unit = load_targets(places, units, 0, end, num_slots)
    empty = gl.zeros([PIECE_DIMS, TILE_KEYS], gl.float32, PIECE_LAYOUT)
    for tile in tl.range(0, tiles, disable_licm=True):
        stage = tile % STAGES
        place, unit = next_place, next_unit
        async_copy.wait_group(STAGES - 2)
        gl.barrier()
        # Where nobody reads since the barrier; before the fence, or Triton makes one before each product.
        copy_factors(factors, rank, num_keys, (tile + STAGES - 1) % STAGES, p, ds, C)
        fence_async_shared()
        gl.barrier()
        rank = load_ranks(ranks, tile + STAGES, end, most_merged, FACTORS)
        next_place, next_unit = load_targets(places, units, tile + 1, end, num_slots)
        for part in range(PIECES):
            acc0 = multiply(q.index(part), dout.index(part), p.index(stage), ds.index(stage), 0, empty, C)
            acc1 = multiply(q.index(part), dout.index(part), p.index(stage), ds.index(stage), 1, empty, C)
            acc2 = multiply(q.index(part), dout.index(part), p.index(stage), ds.index(stage), 2, empty, C)
            acc3 = multiply(q.index(part), dout.index(part), p.index(stage), ds.index(stage), 3, empty, C)
            acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
            add_piece(acc0, acc1, acc2, acc3, first_piece + part, unit, place, sums_ptr, C)
    async_copy.wait_group(0)
