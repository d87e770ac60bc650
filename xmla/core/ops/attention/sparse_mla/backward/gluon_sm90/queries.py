"""dq of few heads on Hopper, in Gluon: keys are the rows of products, so that none are of heads that are not there.

A CTA has a token and all its keys, a tile at a time, in the token's own order. Two tiles are on their way: while one is
multiplied the next is copied. P and dS are kept for the gradients of entries (entries.py), which several tokens add.
"""

from triton import language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.common import (
    PIECE_DIMS,
    VALUE_PIECES,
    against,
    columns_of,
    derive,
    rows_of,
)
from xmla.core.ops.attention.sparse_mla.backward.kernels import MOST_PROBABLE, NOT_A_NUMBER
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import offsets
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import copy_columns

TILE_KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def load_slots(slots, tile, end, LAYOUT: gl.constexpr):
    """Slots [TILE_KEYS] of a tile's entries, −1 past the end."""
    offs = tile * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=LAYOUT)
    return gl.load(slots + offs, mask=offs < end, other=-1)


@gluon.jit
def copy_entries(cache_ptr, slot, stage, entries, C: gl.constexpr):
    """Start copies of a tile's entries; a group of copies, whether there are any or not."""
    PIECES: gl.constexpr = C.PIECES
    data, _ = offsets(slot, C.LAYOUT, C.SOURCE.PAGE_STRIDE, C.SOURCE.PAGE_SIZE)
    for piece in gl.static_range(PIECES):
        copy_columns(cache_ptr + data, slot >= 0, entries.index(stage * PIECES + piece), piece * PIECE_DIMS)
    async_copy.commit_group()


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def sparse_mla_backward_dq_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    dout_ptr,  # [T, H, LANES]
    ordered_ptr,  # [tokens of a launch, K] i32, as `merge_slots_kernel` says
    ends_ptr,  # [tokens of a launch] i32
    lse_ptr,  # [T, H] f32 if OWN_LSE
    dlse_ptr,  # [T, H] f32 if OWN_LSE
    total_ptr,  # [T, H] f32
    delta_ptr,  # [T, H] f32
    num_keys,  # K
    first_token,
    references_ptr,  # [P, R] i32
    factors_ptr,  # [tokens of a launch, K, 2, SUMMED_HEADS]: dS and P
    dq_ptr,  # [T, H, L+E]
    C: gl.constexpr,  # HopperProducts
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    HEADS: gl.constexpr = C.SUMMED_HEADS
    PIECES: gl.constexpr = C.PIECES
    LAYOUT: gl.constexpr = C.LAYOUT
    S_LAYOUT: gl.constexpr = against(HEADS)
    KEYS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROWS: gl.constexpr = gl.SliceLayout(1, rows_of(PIECE_DIMS))
    ROW: gl.constexpr = columns_of(PIECE_DIMS)
    gl.static_assert(LAYOUT.row == LAYOUT.dims and LAYOUT.rope_offset == LAYOUT.latent, "a row is its dims in order")
    local = gl.program_id(0).to(gl.int64)
    token = first_token + local
    end = gl.load(ends_ptr + local)
    tiles = gl.cdiv(end, TILE_KEYS)
    slots = ordered_ptr + offset_of(local, num_keys)
    entries = gl.allocate_shared_memory(DTYPE, [STAGES * PIECES, TILE_KEYS, PIECE_DIMS], ROW)
    q = gl.allocate_shared_memory(DTYPE, [PIECES, HEADS, PIECE_DIMS], ROW)
    dout = gl.allocate_shared_memory(DTYPE, [VALUE_PIECES, HEADS, PIECE_DIMS], ROW)
    factors = gl.allocate_shared_memory(DTYPE, [TILE_KEYS, HEADS], columns_of(HEADS))

    offs_h = gl.arange(0, HEADS, layout=ROWS)
    q_row = q_ptr + offset_of(token, C.Q_STRIDE_T) + offset_of(offs_h, C.Q_STRIDE_H, C.HEADS)
    dout_row = dout_ptr + offset_of(token, C.DOUT_STRIDE_T) + offset_of(offs_h, C.DOUT_STRIDE_H, C.HEADS)
    for piece in gl.static_range(PIECES):
        copy_columns(q_row, offs_h < C.HEADS, q.index(piece), piece * PIECE_DIMS)
    for piece in gl.static_range(VALUE_PIECES):
        copy_columns(dout_row, offs_h < C.HEADS, dout.index(piece), piece * PIECE_DIMS)
    copy_entries(cache_ptr, load_slots(slots, 0, end, ROWS), 0, entries, C)
    slot = load_slots(slots, 1, end, ROWS)

    offs_h = gl.arange(0, HEADS, layout=gl.SliceLayout(0, S_LAYOUT))
    head_ok = offs_h < C.HEADS
    place = offset_of(token, C.HEADS) + offs_h
    # A head that is none has no probabilities.
    total = gl.expand_dims(gl.load(total_ptr + place, mask=head_ok, other=float("inf")), 0)
    delta = gl.expand_dims(gl.load(delta_ptr + place, mask=head_ok, other=0.0), 0)
    lse, dlse = total, delta
    if C.OWN_LSE:
        own = gl.load(lse_ptr + offset_of(token, C.LSE_STRIDE) + offs_h, mask=head_ok, other=float("inf"))
        lse = gl.expand_dims(own * C.LSE_UNIT, 0)
        own = gl.load(dlse_ptr + offset_of(token, C.DLSE_STRIDE) + offs_h, mask=head_ok, other=0.0)
        dlse = gl.expand_dims(own * (LOG2E / C.LSE_UNIT), 0)
    empty = gl.zeros([TILE_KEYS, HEADS], gl.float32, S_LAYOUT)
    zeros = gl.zeros([PIECE_DIMS, HEADS], gl.float32, S_LAYOUT)
    dq0, dq1, dq2, dq3, dq4, dq5, dq6, dq7, dq8 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    factors_row = factors_ptr + offset_of(local, num_keys) * (2 * HEADS) + gl.expand_dims(offs_h, 0)
    for tile in tl.range(0, tiles, disable_licm=True):
        stage = tile % STAGES
        first = stage * PIECES
        async_copy.wait_group(0)
        fence_async_shared()
        gl.barrier()
        s, dp = empty, empty
        for piece in gl.static_range(PIECES):
            keys = entries.index(first + piece)
            s = warpgroup_mma(keys, q.index(piece).permute((1, 0)), s, use_acc=piece > 0, is_async=True)
            if piece < VALUE_PIECES:
                dp = warpgroup_mma(keys, dout.index(piece).permute((1, 0)), dp, use_acc=piece > 0, is_async=True)
        # Fences wait for copies under way: those of the next tile start behind this one's, and behind its products, or
        # the compiler makes a fence between them.
        copy_entries(cache_ptr, slot, (tile + 1) % STAGES, entries, C)
        slot = load_slots(slots, tile + 2, end, ROWS)
        named = load_slots(slots, tile, end, KEYS)
        scores, dp = warpgroup_mma_wait(0, deps=[s, dp])
        p, ds, greatest = derive(scores, dp, total, delta, lse, dlse, C)
        ds = gl.where(greatest <= MOST_PROBABLE, ds * C.SCALE, float("nan"))
        wrong = gl.reduce(gl.where(gl.abs(ds) < float("inf"), 0, 1), 1, either)
        gl.store(references_ptr + named, gl.full([TILE_KEYS], NOT_A_NUMBER, gl.int32, KEYS),
                 mask=(named >= 0) & (wrong != 0))  # fmt: skip
        ds = gl.where(gl.expand_dims(named >= 0, 1), ds, 0.0).to(DTYPE)
        p = p.to(DTYPE)
        factors.store(ds)
        fence_async_shared()
        gl.barrier()
        dq0 = start_dq(entries, first, factors, dq0)
        dq1 = start_dq(entries, first + 1, factors, dq1)
        dq2 = start_dq(entries, first + 2, factors, dq2)
        dq3 = start_dq(entries, first + 3, factors, dq3)
        dq4 = start_dq(entries, first + 4, factors, dq4)
        dq5 = start_dq(entries, first + 5, factors, dq5)
        dq6 = start_dq(entries, first + 6, factors, dq6)
        dq7 = start_dq(entries, first + 7, factors, dq7)
        if LAYOUT.tail:
            dq8 = start_dq(entries, first + 8, factors, dq8)
        offs_k = tile * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=KEYS)
        row = factors_row + gl.expand_dims(offset_of(offs_k, 2 * HEADS), 1)
        key_ok = gl.expand_dims(offs_k < end, 1) & gl.expand_dims(offs_h < HEADS, 0)
        gl.store(row, ds, mask=key_ok)
        gl.store(row + HEADS, p, mask=key_ok)
        if LAYOUT.tail:
            dq0, dq1, dq2, dq3, dq4, dq5, dq6, dq7, dq8 = warpgroup_mma_wait(
                0, deps=[dq0, dq1, dq2, dq3, dq4, dq5, dq6, dq7, dq8]
            )
        else:
            dq0, dq1, dq2, dq3, dq4, dq5, dq6, dq7 = warpgroup_mma_wait(
                0, deps=[dq0, dq1, dq2, dq3, dq4, dq5, dq6, dq7]
            )
    async_copy.wait_group(0)

    dq_row = dq_ptr + offset_of(token, C.HEADS * LAYOUT.dims)
    store_dq(dq0, dq_row, 0, C)
    store_dq(dq1, dq_row, 1, C)
    store_dq(dq2, dq_row, 2, C)
    store_dq(dq3, dq_row, 3, C)
    store_dq(dq4, dq_row, 4, C)
    store_dq(dq5, dq_row, 5, C)
    store_dq(dq6, dq_row, 6, C)
    store_dq(dq7, dq_row, 7, C)
    if LAYOUT.tail:
        store_dq(dq8, dq_row, 8, C)


@gluon.jit
def start_dq(entries, piece, factors, dq):
    """Start dq + entriesᵀ·dS of a piece of dims, [PIECE_DIMS, HEADS]."""
    return warpgroup_mma(entries.index(piece).permute((1, 0)), factors, dq, is_async=True)


@gluon.jit
def store_dq(dq, dq_row, piece: gl.constexpr, C: gl.constexpr):
    offs_d = piece * PIECE_DIMS + gl.arange(0, PIECE_DIMS, layout=gl.SliceLayout(1, dq.type.layout))
    offs_h = gl.arange(0, C.SUMMED_HEADS, layout=gl.SliceLayout(0, dq.type.layout))
    ptrs = dq_row + gl.expand_dims(offset_of(offs_h, C.LAYOUT.dims, C.HEADS), 0) + gl.expand_dims(offs_d, 1)
    ok = gl.expand_dims(offs_h < C.HEADS, 0) & gl.expand_dims(offs_d >= 0, 1)
    gl.store(ptrs, dq.to(dq_row.dtype.element_ty), mask=ok)
