"""Entries' gradients of few heads on Hopper, in Gluon: the summands of eight tokens are added at once.

A CTA has a group of tokens, a part of the dims, and all entries that the group names (merge.py), a tile at a time, and
of a tile a token at a time. From dS and P, which queries.py has kept, it computes dSᵀ·q + Pᵀ·dout of each token by
itself, as if it were alone. Where a token does not name an entry, dS and P are zeros, and a NaN of its q or dout is 0.
Each token's summand is rounded to an integer, so that their sum has no order, and is added in the L2 cache once.

While a token's product is computed the one before is rounded and added, in registers: floats that are integers, so that
an addition that rounds down does both. A tile's sums go through shared memory, for requests of whole lines, a part of
them during each step of the next tile. Even and odd steps have dS and P in buffers of their own, so that none is copied
to where the compiler sees a product read. Products have them from registers: what copies have written the asynchronous
proxy could read only behind a fence, which waits for all copies under way.
"""

from triton import language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.common import columns_of
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.merge import MOST_COUNTED as _MOST_COUNTED
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.merge import TOKENS as _TOKENS
from xmla.core.ops.attention.sparse_mla.backward.kernels import WORDS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import VALUE_DIMS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import copy_columns

TOKENS = gl.constexpr(_TOKENS.value)
MOST_COUNTED = gl.constexpr(_MOST_COUNTED.value)
TILE_KEYS = gl.constexpr(64)
CHUNK_KEYS = gl.constexpr(TILE_KEYS.value // TOKENS.value)  # of a tile's sums, which are added during a step
WARPGROUP_DIMS = gl.constexpr(64)
RING = gl.constexpr(3)  # buffers of even steps, and of odd ones
AHEAD = gl.constexpr(2 * RING.value - 3)  # steps by which copies are
SUM_OF_NONE = gl.constexpr(1.5 * 2**23)  # float32 from 2**23 to 2**24 are integers
SUM_OF_NONE_BITS = gl.constexpr(0x4B400000)
SMALL = gl.constexpr(19)  # bits of a summand that is added to such a number: eight are below 2**22
ADDED = gl.constexpr(32)  # elements of a thread, 16 of each of two entries
ADD_OPERANDS = gl.constexpr(",".join(["=&f"] * ADDED.value + [kind for kind in "lrffrr" for _ in range(ADDED.value)]))
SETTLE_OPERANDS = gl.constexpr(",".join(["=&r"] * ADDED.value + [kind for kind in "lrfrr" for _ in range(ADDED.value)]))


@gluon.constexpr_function
def products_of(warpgroups):
    """Products of a tile's keys and the dims of so many warpgroups."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, warpgroups], instr_shape=[16, WARPGROUP_DIMS.value, 16]
    )


@gluon.constexpr_function
def rows_of(dims, warpgroups):
    """Threads against rows of so many 16-bit dims: 16 bytes each."""
    return gl.BlockedLayout([1, 8], [256 // dims, dims // 8], [4 * warpgroups, 1], [1, 0])


@gluon.constexpr_function
def chunk_of(warpgroups):
    """Warps against rows of sums: a line of the L2 cache each."""
    return gl.BlockedLayout([1, 1], [1, 32], [4 * warpgroups, 1], [1, 0])


@gluon.constexpr_function
def additions(dims):
    """PTX that adds a token's summands, rounded, to a thread's sums.

    Element i has entry i // 2 % 2 · 8 and dim i // 4 · 8 + i % 2 from the thread's first. Operands: sums with x, the
    pointer to the first entry's low words, dims, sums as floats that are integers, x, and of each entry its unit and
    place. Where any |x| is large or x is no number, which is seldom, sums get low bits of x, and the rest is added in
    the L2 cache at once.
    """
    count, chains, small = ADDED.value, 4, SMALL.value
    base, dim, sums, x, unit, place = ([f"${operand * count + i}" for i in range(count)] for operand in range(1, 7))
    lines = [f".reg .pred fast, high; .reg .f32 z<{count}>, u<2>, a, most<{chains}>; .reg .b32 whole, s, t, low, bits;"]
    lines += [".reg .b64 sum, wide;"]
    for row in range(2):
        lines += [f"and.b32 s, {unit[2 * row]}, 0xff800000;", f"mov.b32 u{row}, s;"]
    for i in range(count):
        lines += [f"fma.rn.f32 z{i}, {x[i]}, u{i // 2 % 2}, 0f3F000000;"]
        lines += [f"abs.f32 most{i}, z{i};" if i < chains else f"abs.f32 a, z{i};"]
        lines += [f"add.f32 most{i % chains}, most{i % chains}, a;"] * (i >= chains)
    limit = f"0f{(127 + small) << 23:08X}"
    lines += [f"setp.lt.f32 fast, most0, {limit};"]
    lines += [f"setp.lt.and.f32 fast, most{chain}, {limit}, fast;" for chain in range(1, chains)]
    lines += ["@!fast bra slow;", *(f"add.rm.f32 ${i}, {sums[i]}, z{i};" for i in range(count)), "bra done;", "slow:"]
    for i in range(count):
        row = i // 2 % 2
        lines += [f"mov.b32 low, {sums[i]};", f"cvt.rmi.s32.f32 whole, z{i};", f"add.s32 t, whole, {1 << small};"]
        lines += [f"shr.s32 t, t, {small + 1};", f"shl.b32 t, t, {small + 1};", "neg.s32 s, t;", "add.s32 s, whole, s;"]
        lines += ["add.s32 low, low, s;", f"mov.b32 ${i}, low;", "setp.ne.s32 high, t, 0;"]
        lines += [f"and.b32 bits, {unit[2 * row]}, 63;", "add.s32 s, bits, -1;", "shl.b32 s, 1, s;", "add.s32 s, t, s;"]
        lines += ["shr.s32 s, s, bits;", "cvt.s64.s32 wide, s;", "shl.b32 s, s, bits;", "neg.s32 s, s;"]
        lines += ["add.s32 low, t, s;", f"mad.wide.s32 sum, {place[2 * row]}, {4 * WORDS.value * dims}, {base[0]};"]
        lines += [f"mad.wide.s32 sum, {dim[0]}, 4, sum;"]
        first = i // 4 * 8 + i % 2
        lines += [f"@high red.relaxed.gpu.global.add.u32 [sum + {4 * first}], low;"]
        lines += [f"mad.wide.s32 sum, {dim[0]}, 4, sum;"]
        lines += [f"@high red.relaxed.gpu.global.add.u64 [sum + {4 * dims + 8 * first}], wide;"]
    return "\n".join(["{", *lines, "done:", "}"])


@gluon.constexpr_function
def settlements(dims):
    """PTX that makes integers of a thread's sums, and adds their high parts, which few have, in the L2 cache."""
    count, none = ADDED.value, -SUM_OF_NONE_BITS.value
    base, dim, sums, unit, place = ([f"${operand * count + i}" for i in range(count)] for operand in range(1, 6))
    lines = [".reg .pred fast, high; .reg .b32 s, t, bits<2>, half<2>, shift<2>, any<2>; .reg .b64 sum, wide;"]
    for row in range(2):
        lines += [f"and.b32 bits{row}, {unit[2 * row]}, 63;", f"add.s32 s, bits{row}, -1;", f"shl.b32 half{row}, 1, s;"]
        lines += [f"add.s32 shift{row}, half{row}, {none};", f"mov.b32 any{row}, 0;"]
    for i in range(count):
        row = i // 2 % 2
        lines += [f"mov.b32 t, {sums[i]};", f"add.s32 ${i}, t, {none};", f"add.s32 t, t, shift{row};"]
        lines += [f"or.b32 any{row}, any{row}, t;"]
    lines += [f"shr.u32 any{row}, any{row}, bits{row};" for row in range(2)]
    lines += ["or.b32 any0, any0, any1;", "setp.eq.u32 fast, any0, 0;", "@fast bra done;"]
    for i in range(count):
        row = i // 2 % 2
        lines += [f"add.s32 s, ${i}, half{row};", f"shr.s32 s, s, bits{row};", "cvt.s64.s32 wide, s;"]
        lines += ["setp.ne.s32 high, s, 0;", f"shl.b32 s, s, bits{row};", "neg.s32 s, s;", f"add.s32 ${i}, ${i}, s;"]
        lines += [f"mad.wide.s32 sum, {place[2 * row]}, {4 * WORDS.value * dims}, {base[0]};"]
        lines += [f"mad.wide.s32 sum, {dim[0]}, 8, sum;"]
        first = i // 4 * 8 + i % 2
        lines += [f"@high red.relaxed.gpu.global.add.u64 [sum + {4 * dims + 8 * first}], wide;"]
    return "\n".join(["{", *lines, "done:", "}"])


@gluon.constexpr_function
def line_additions(dims):
    """PTX that adds integers to the low words of two dims, 32 apart, of an entry, unless that is −1."""
    lines = [".reg .pred ok; .reg .b64 sum;", "mov.b32 $0, 0;", "mov.b32 $1, 0;", "setp.lt.s32 ok, $4, 0;"]
    lines += ["@ok bra done;", f"mad.wide.s32 sum, $4, {4 * WORDS.value * dims}, $2;"]
    lines += ["red.relaxed.gpu.global.add.u32 [sum], $6;", "red.relaxed.gpu.global.add.u32 [sum + 128], $7;"]
    return "\n".join(["{", *lines, "done:", "}"])


@gluon.jit
def add_token(sums, acc, dim, unit, place, sums_ptr, C: gl.constexpr):
    """Sums with a token's summands added."""
    return gl.inline_asm_elementwise(
        additions(C.LAYOUT.dims),
        ADD_OPERANDS,
        [sums_ptr.to(gl.uint64, bitcast=True), dim, sums, acc, unit, place],
        dtype=gl.float32,
        is_pure=False,
        pack=ADDED,
    )


@gluon.jit
def settle(sums, dim, unit, place, sums_ptr, C: gl.constexpr):
    """Sums as integers that are added to low words."""
    return gl.inline_asm_elementwise(
        settlements(C.LAYOUT.dims),
        SETTLE_OPERANDS,
        [sums_ptr.to(gl.uint64, bitcast=True), dim, sums, unit, place],
        dtype=gl.int32,
        is_pure=False,
        pack=ADDED,
    )


@gluon.jit
def load_rank(ranks, tile, NUMBER: gl.constexpr, end, most_merged, LAYOUT: gl.constexpr):
    """Ranks [TILE_KEYS] of a tile's entries among a token's slots, −1 for none; of a later tile for a later number."""
    key = (tile + NUMBER // TOKENS) * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=LAYOUT)
    return gl.load(ranks + NUMBER % TOKENS * most_merged + key, mask=key < end, other=-1)


@gluon.jit
def copy_factors(factors, NUMBER: gl.constexpr, rank, num_keys, smem, C: gl.constexpr):
    """Start copies of a token's dS and P of a tile, zeros where it does not name the entry."""
    rows = factors + (NUMBER % TOKENS * num_keys + rank) * (2 * C.SUMMED_HEADS)
    copy_columns(rows, rank >= 0, smem, 0)
    async_copy.commit_group()


@gluon.jit
def load_targets(places, units, tile, end, LAYOUT: gl.constexpr):
    """The entries of a tile and the units of their sums; past the last, any, to which nothing is added."""
    key = tile * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=LAYOUT)
    ok = key < end
    return gl.load(places + key, mask=ok, other=0), gl.load(units + key, mask=ok, other=1)


@gluon.jit
def add_chunk(sums, places, tile, chunk, first_dim, end, sums_ptr, C: gl.constexpr):
    """Add some rows of a tile's sums in the L2 cache."""
    LAYOUT: gl.constexpr = chunk_of(C.WARPGROUPS)
    key = tile * TILE_KEYS + chunk * CHUNK_KEYS + gl.arange(0, CHUNK_KEYS, layout=gl.SliceLayout(1, LAYOUT))
    place = gl.expand_dims(gl.load(places + key, mask=(key >= 0) & (key < end), other=-1), 1)
    dim = first_dim + gl.expand_dims(gl.arange(0, C.PART_DIMS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    if C.LAYOUT.dims % C.PART_DIMS:
        place = gl.where(dim < C.LAYOUT.dims, place, -1)
    gl.inline_asm_elementwise(
        line_additions(C.LAYOUT.dims),
        "=&r,=&r,l,l,r,r,r,r",
        [(sums_ptr + dim).to(gl.uint64, bitcast=True), place, sums.index(chunk).load(LAYOUT)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def sparse_mla_backward_dcache_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    dout_ptr,  # [T, H, LANES]
    factors_ptr,  # [tokens of a launch, K, 2, SUMMED_HEADS]: dS and P
    places_ptr,  # [groups, TOKENS·K] i32, as `merge_slots_kernel` says
    units_ptr,  # [groups, TOKENS·K] i32
    ranks_ptr,  # [groups, TOKENS, TOKENS·K] i32
    merged_ends_ptr,  # [groups] i32
    num_keys,  # K ≤ MOST_COUNTED
    num_tokens,  # T
    first_token,
    sums_ptr,  # [P, R, WORDS·ROW] i32
    C: gl.constexpr,  # MergedEntries
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    HEADS: gl.constexpr = C.SUMMED_HEADS
    DIMS: gl.constexpr = C.PART_DIMS
    PRODUCT: gl.constexpr = products_of(C.WARPGROUPS)
    KEYS: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    FACTORS: gl.constexpr = gl.SliceLayout(1, rows_of(2 * HEADS, C.WARPGROUPS))
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    group = (gl.program_id(0) // C.PARTS).to(gl.int64)
    first_dim = gl.program_id(0) % C.PARTS * DIMS
    token = first_token + group * TOKENS
    most_merged = TOKENS * num_keys.to(gl.int64)
    places, units = places_ptr + offset_of(group, most_merged), units_ptr + offset_of(group, most_merged)
    ranks = ranks_ptr + offset_of(group * TOKENS, most_merged)
    factors = factors_ptr + offset_of(group * TOKENS, num_keys) * (2 * HEADS)
    num_keys = gl.minimum(num_keys, MOST_COUNTED)  # it is no more; so offsets of a group's tokens have 32 bits
    end = gl.load(merged_ends_ptr + group)
    tiles = gl.cdiv(end, TILE_KEYS)
    queries = gl.allocate_shared_memory(DTYPE, [TOKENS, 2 * HEADS, DIMS], columns_of(WARPGROUP_DIMS))
    even = gl.allocate_shared_memory(DTYPE, [RING, TILE_KEYS, 2 * HEADS], columns_of(2 * HEADS))
    odd = gl.allocate_shared_memory(DTYPE, [RING, TILE_KEYS, 2 * HEADS], columns_of(2 * HEADS))
    summed = gl.allocate_shared_memory(gl.int32, [TOKENS, CHUNK_KEYS, DIMS], SUMS)
    whole_tile = summed.reinterpret(gl.int32, [TILE_KEYS, DIMS], SUMS)

    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, rows_of(DIMS, C.WARPGROUPS)))
    for number in gl.static_range(TOKENS):
        row = (token + number).to(gl.int64)
        ok = (row < num_tokens) & (head < C.HEADS)
        q_row = q_ptr + offset_of(row, C.Q_STRIDE_T) + offset_of(head, C.Q_STRIDE_H, C.HEADS)
        dout_row = dout_ptr + offset_of(row, C.DOUT_STRIDE_T) + offset_of(head, C.DOUT_STRIDE_H, C.HEADS)
        copy_heads(q_row, ok, queries.index(number).slice(0, HEADS), first_dim, C.LAYOUT.dims, C)
        copy_heads(dout_row, ok, queries.index(number).slice(HEADS, HEADS), first_dim, VALUE_DIMS, C)
    for first in gl.static_range(AHEAD):
        rank = load_rank(ranks, 0, first, end, most_merged, FACTORS)
        if first % 2:
            copy_factors(factors, first, rank, num_keys, odd.index(first // 2), C)
        else:
            copy_factors(factors, first, rank, num_keys, even.index(first // 2), C)
    rank = load_rank(ranks, 0, AHEAD, end, most_merged, FACTORS)
    place, unit = load_targets(places, units, 0, end, KEYS)
    dim = first_dim + gl.expand_dims(gl.arange(0, DIMS, layout=gl.SliceLayout(0, PRODUCT)), 0)
    empty = gl.zeros([TILE_KEYS, DIMS], gl.float32, PRODUCT)
    sums = gl.full([TILE_KEYS, DIMS], SUM_OF_NONE, gl.float32, PRODUCT)
    whole_tile.store(gl.zeros([TILE_KEYS, DIMS], gl.int32, PRODUCT))
    async_copy.wait_group(AHEAD - 1)
    fence_async_shared()  # of q and dout
    gl.barrier()
    for tile in tl.range(0, tiles, disable_licm=True):
        turn = tile * (TOKENS // 2)
        smem = odd.index((turn + RING - 2) % RING)
        rank = start_step(factors, ranks, rank, tile, 0, smem, num_keys, end, most_merged, C)
        even_acc = multiply(even.index(turn % RING), queries.index(0), empty)
        for pair in gl.static_range(TOKENS // 2):
            add_chunk(summed, places, tile - 1, 2 * pair, first_dim, end, sums_ptr, C)
            smem = even.index((turn + pair + RING - 1) % RING)
            rank = start_step(factors, ranks, rank, tile, 2 * pair + 1, smem, num_keys, end, most_merged, C)
            odd_acc = multiply(odd.index((turn + pair) % RING), queries.index(2 * pair + 1), empty)
            even_acc = warpgroup_mma_wait(1, deps=[even_acc])
            sums = add_token(sums, even_acc, dim, gl.expand_dims(unit, 1), gl.expand_dims(place, 1), sums_ptr, C)
            add_chunk(summed, places, tile - 1, 2 * pair + 1, first_dim, end, sums_ptr, C)
            if pair < TOKENS // 2 - 1:
                smem = odd.index((turn + pair + RING - 1) % RING)
                rank = start_step(factors, ranks, rank, tile, 2 * pair + 2, smem, num_keys, end, most_merged, C)
                even_acc = multiply(even.index((turn + pair + 1) % RING), queries.index(2 * pair + 2), empty)
                odd_acc = warpgroup_mma_wait(1, deps=[odd_acc])
            else:
                odd_acc = warpgroup_mma_wait(0, deps=[odd_acc])
            sums = add_token(sums, odd_acc, dim, gl.expand_dims(unit, 1), gl.expand_dims(place, 1), sums_ptr, C)
        integers = settle(sums, dim, gl.expand_dims(unit, 1), gl.expand_dims(place, 1), sums_ptr, C)
        gl.barrier()  # everybody has read the sums of the tile before
        whole_tile.store(integers)
        sums = gl.full([TILE_KEYS, DIMS], SUM_OF_NONE, gl.float32, PRODUCT)
        place, unit = load_targets(places, units, tile + 1, end, KEYS)
    async_copy.wait_group(0)
    gl.barrier()
    for chunk in range(0, TOKENS):
        add_chunk(summed, places, tiles - 1, chunk, first_dim, end, sums_ptr, C)


@gluon.jit
def start_step(
    factors, ranks, rank, tile, NUMBER: gl.constexpr, smem, num_keys, end, most_merged, C: gl.constexpr
):  # fmt: skip
    """Wait for a token's dS and P; start the copies of the one AHEAD of it, and load the ranks of the one behind."""
    async_copy.wait_group(AHEAD - 1)
    gl.barrier()
    copy_factors(factors, NUMBER + AHEAD, rank, num_keys, smem, C)
    return load_rank(ranks, tile, NUMBER + AHEAD + 1, end, most_merged, rank.type.layout)


@gluon.jit
def multiply(factors, queries, empty):
    """Start dSᵀ·q + Pᵀ·dout of a token."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=empty.type.layout, k_width=2)
    return warpgroup_mma(factors.load(LEFT), queries, empty, use_acc=False, is_async=True)


@gluon.jit
def copy_heads(rows, ok, smem, first_dim, END: gl.constexpr, C: gl.constexpr):
    """Start copies of dims of a token's heads; zeros from the dim END on."""
    COPY: gl.constexpr = rows.type.layout.parent
    dim = first_dim + gl.expand_dims(gl.arange(0, C.PART_DIMS, layout=gl.SliceLayout(0, COPY)), 0)
    ptrs = gl.max_contiguous(gl.multiple_of(gl.expand_dims(rows, 1) + dim, [16, 16]), [1, 8])
    async_copy.async_load(smem, ptrs, mask=gl.max_constancy(gl.expand_dims(ok, 1) & (dim < END), [1, 8]))
