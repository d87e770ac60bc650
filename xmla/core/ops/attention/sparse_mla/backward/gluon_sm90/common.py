"""What both kernels of the derivative for Hopper share: who has what, the way in and out, and dS of a tile."""

from typing import Any, NamedTuple

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import TILE_HEADS, VALUE_DIMS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import copy_columns, exp2

PIECE_DIMS = gl.constexpr(64)
VALUE_PIECES = gl.constexpr(VALUE_DIMS.value // PIECE_DIMS.value)
# Registers per thread; together with the first warpgroup, `differentiate` too, they have 512.
GATHER_REGISTERS = gl.constexpr(24)
SCORE_REGISTERS = gl.constexpr(104)
DIFFERENTIATE_REGISTERS = gl.constexpr(192)

DQ_LAYOUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE_DIMS.value, 16])
)


class Task(NamedTuple):
    """What a CTA computes: a block of heads of a token."""

    cache: Any  # [P, R, ROW]
    slots: Any  # [K] i32
    num_slots: Any
    end: Any  # of the slots, all valid
    q_row: Any  # [HEADS, L+E]
    dout_row: Any  # [HEADS, VALUE_DIMS]
    total: Any  # [HEADS] f32
    delta: Any  # [HEADS] f32
    lse: Any  # [HEADS] f32 if OWN_LSE
    dlse: Any  # [HEADS] f32 if OWN_LSE
    bounds: Any  # [P, R] i32, or None
    references: Any  # [P, R] i32, or None
    sums: Any  # [P, R, WORDS·ROW] i32; [P, R, ROW] f32 in any order
    dq_row: Any  # [HEADS, L+E]
    first_head: Any


@gluon.jit
def start(
    q_ptr, cache_ptr, slots_ptr, dout_ptr, ends_ptr, lse_ptr, dlse_ptr, total_ptr, delta_ptr, num_slots, num_keys,
    first_token, sums_ptr, dq_ptr, bounds_ptr, references_ptr, TILE_KEYS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The task of this CTA; in any order there are no bounds and references."""
    LAYOUT: gl.constexpr = C.LAYOUT
    gl.static_assert(not LAYOUT.packed, "gradients are of plain rows")
    gl.static_assert(LAYOUT.dims - LAYOUT.tail == VALUE_DIMS, "two warpgroups have halves of 512 value dims")
    gl.static_assert(LAYOUT.tail == 0 or LAYOUT.tail == PIECE_DIMS, "roped dims are a piece")
    gl.static_assert(LAYOUT.row == LAYOUT.dims and LAYOUT.rope_offset == LAYOUT.latent, "a row is its dims in order")
    token = (first_token + gl.program_id(0) // C.HEAD_BLOCKS).to(gl.int64)
    place = offset_of(token, C.HEADS)
    end = gl.load(ends_ptr + token)
    tiles = gl.cdiv(end, TILE_KEYS)
    task = Task(
        cache_ptr,
        slots_ptr + offset_of(token, num_keys),
        num_slots,
        end,
        q_ptr + offset_of(token, C.Q_STRIDE_T),
        dout_ptr + offset_of(token, C.DOUT_STRIDE_T),
        total_ptr + place,
        delta_ptr + place,
        lse_ptr + offset_of(token, C.LSE_STRIDE),
        dlse_ptr + offset_of(token, C.DLSE_STRIDE),
        bounds_ptr,
        references_ptr,
        sums_ptr,
        dq_ptr + offset_of(place, LAYOUT.dims),
        gl.program_id(0) % C.HEAD_BLOCKS * TILE_HEADS,
    )
    return task, tiles


@gluon.constexpr_function
def against(columns):
    """Products of 64 rows with so many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def columns_of(dims):
    """Shared memory of 16-bit matrices with rows of so many dims."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * dims, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def rows_of(dims):
    """Threads against rows of so many 16-bit dims: 16 bytes each."""
    return gl.BlockedLayout([1, 8], [256 // dims, dims // 8], [4, 1], [1, 0])


@gluon.jit
def copy_rows(rows, first_head, smem, PIECES: gl.constexpr, STRIDE: gl.constexpr, C: gl.constexpr):
    """Copy rows of the heads to shared memory."""
    DIMS: gl.constexpr = smem.shape[2]
    ROWS: gl.constexpr = gl.SliceLayout(1, rows_of(DIMS))
    offs_h = first_head + gl.arange(0, TILE_HEADS, layout=ROWS)
    ok = offs_h < C.HEADS
    rows += offset_of(offs_h, STRIDE, C.HEADS)
    for piece in gl.static_range(PIECES):
        copy_columns(rows, ok, smem.index(piece), piece * DIMS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def load_heads(ptr, offs_h, C: gl.constexpr, other):
    """Values of heads, `other` for one that is none."""
    return gl.load(ptr + offs_h, mask=offs_h < C.HEADS, other=other)


@gluon.jit
def load_rows(task, offs_h, C: gl.constexpr):
    """Total and delta of heads, to be used against keys, and if OWN_LSE lse in log2 and its gradient."""
    # A head that is none has no probabilities.
    total = gl.expand_dims(load_heads(task.total, offs_h, C, float("inf")), 1)
    delta = gl.expand_dims(load_heads(task.delta, offs_h, C, 0.0), 1)
    lse, dlse = total, delta
    if C.OWN_LSE:
        lse = gl.expand_dims(load_heads(task.lse, offs_h, C, float("inf")) * C.LSE_UNIT, 1)
        dlse = gl.expand_dims(load_heads(task.dlse, offs_h, C, 0.0) * (LOG2E / C.LSE_UNIT), 1)
    return total, delta, lse, dlse


@gluon.jit
def derive(scores, dp, total, delta, lse, dlse, C: gl.constexpr):
    """P, dS / SCALE, and the probabilities of which none may be too great, as in `backward.kernels.derive`."""
    scores = scores * (C.SCALE * LOG2E)
    p = exp2(scores - total)
    greatest = p
    ds = p * (dp - delta)
    if C.OWN_LSE:
        own = exp2(scores - lse)
        ds += own * dlse
        greatest = gl.maximum(p, own)
    return p, ds, greatest


@gluon.jit
def store_dims(dq, smem, first, task, C: gl.constexpr):
    """Store dims `first` … of dq through `smem`."""
    ROWS: gl.constexpr = rows_of(smem.shape[1])
    smem.store(dq.to(smem.dtype))
    gl.barrier()
    rows = smem.load(ROWS)
    offs_h = task.first_head + gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, ROWS))
    offs_d = first + gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, ROWS))
    ptrs = task.dq_row + gl.expand_dims(offset_of(offs_h, C.LAYOUT.dims, C.HEADS), 1) + gl.expand_dims(offs_d, 0)
    gl.store(ptrs, rows, mask=gl.expand_dims(offs_h < C.HEADS, 1))
