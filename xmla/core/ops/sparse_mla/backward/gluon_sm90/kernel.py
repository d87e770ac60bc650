"""The derivative of attention over plain rows on Hopper, in Gluon.

A CTA has a block of heads of a token and all its keys, a tile at a time, on three warpgroups. The producer, `gather`,
copies a tile's entries. Two consumers, `differentiate`, have half of the heads each: scores Sᵀ = K·qᵀ and dP = V·doutᵀ,
and so P and dS, keys by heads, and dqᵀ += Kᵀ·dS. Then they exchange P and dS, and each computes P·dout + dS·q over all
heads for its half of an entry's dims and adds them to the sums. Entries are free before that, which takes the longest,
so that one stage of them is enough: what is added in the L2 cache limits the speed. See benchmarks/log/training.md.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton import language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.lang.sums import SUMMAND_BITS
from xmla.core.lang.sums import gluon_exponent_within as exponent_within
from xmla.core.lang.sums import gluon_low_bits as low_bits
from xmla.core.ops.sparse_mla.backward.kernels import NOT_A_NUMBER, WORDS
from xmla.core.ops.sparse_mla.gluon_sm90.common import (
    TILE_KEYS,
    VALUE_DIMS,
    Source,
    entry_pointers,
    hidden_zero,
    load_slots,
)
from xmla.core.ops.sparse_mla.gluon_sm90.plain import copy_columns, exp2

BLOCK_DIMS = gl.constexpr(64)  # dims that are multiplied at a time
ADDED_DIMS = gl.constexpr(64)  # of entries' gradients that are computed and added at a time
VALUE_BLOCKS = gl.constexpr(VALUE_DIMS.value // BLOCK_DIMS.value)
PRODUCER_REGISTERS = gl.constexpr(40)
CONSUMER_REGISTERS = gl.constexpr(232)
# Registers of dkv as it is added: a warp's threads have 8 successive dims of 4 entries, whole sectors of 64-bit sums.
ADD_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[4, 0], [8, 0], [0, 8], [0, 16], [0, 32]],
        lane_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[TILE_KEYS.value, ADDED_DIMS.value],
    )
)
ADDED = gl.constexpr(TILE_KEYS.value * ADDED_DIMS.value // 128)  # elements of a thread
OPERANDS = gl.constexpr(",".join(["=&r"] * ADDED.value + ["l"] * ADDED.value + ["r"] * (3 * ADDED.value)))
D_LAYOUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ADDED_DIMS.value, 16])
)


class Shared(NamedTuple):
    """Shared memory and its mbarriers; a part has half of a CTA's heads."""

    entries: Any  # [block, TILE_KEYS, BLOCK_DIMS]
    q: Any  # [part · blocks + block, heads, BLOCK_DIMS]
    dout: Any  # [part · VALUE_BLOCKS + block, heads, BLOCK_DIMS]
    p: Any  # [part, TILE_KEYS, heads]
    ds: Any  # [part, TILE_KEYS, heads]
    rows: Any  # [part · 4 + …, heads] f32: total, delta and, if OWN_LSE, lse in log2 and its gradient
    wrong: Any  # [part, TILE_KEYS] i32: whether the entry's gradient is NaN
    q_full: Any
    full: Any
    empty: Any
    p_full: Any
    p_empty: Any


class Task(NamedTuple):
    """What a CTA computes: a block of heads of a token."""

    q_row: Any  # [HEADS, L+E]
    dout_row: Any  # [HEADS, VALUE_DIMS]
    total: Any  # [HEADS] f32
    delta: Any  # [HEADS] f32
    lse: Any  # [HEADS] f32 if OWN_LSE
    dlse: Any  # [HEADS] f32 if OWN_LSE
    bounds: Any  # [P, R] i32
    references: Any  # [P, R] i32
    sums: Any  # [P, R, WORDS·ROW] i32
    dq_row: Any  # [HEADS, L+E]
    first_head: Any


@dataclass(frozen=True)
class Constants:
    """The kernel's constexpr parameters of the same names, for all warpgroups."""

    LAYOUT: Any
    PAGE_STRIDE: int
    PAGE_SIZE: int
    HEADS: int
    Q_STRIDE_H: int
    DOUT_STRIDE_H: int
    OWN_LSE: bool
    SCALE: float
    LSE_UNIT: float
    PART_HEADS: int
    HEAD_BLOCKS: int

    @property
    def blocks(self) -> int:
        return self.LAYOUT.dims // BLOCK_DIMS.value


@gluon.constexpr_function
def constants(*values):
    return Constants(*values)


@gluon.constexpr_function
def scores_layout(heads):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, heads, 16])


@gluon.constexpr_function
def columns_of(dims):
    """Shared memory of 16-bit matrices with rows of so many dims."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * dims, element_bitwidth=16, rank=2)


@gluon.jit
def gather(main, tiles, shared, C: gl.constexpr):
    BLOCKS: gl.constexpr = C.blocks
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 4 × 128 bytes a warp
    slot = load_slots(main, None, 0, 0, ROWS)
    for tile in range(0, tiles):
        entries, _, ok = entry_pointers(main, None, 0, tile, slot, C)
        slot = load_slots(main, None, 0, tile + 1, ROWS)
        mbarrier.wait(shared.empty, (tile & 1) ^ 1)
        for block in gl.static_range(BLOCKS):
            copy_columns(entries, ok, shared.entries.index(block), block * BLOCK_DIMS)
        async_copy.mbarrier_arrive(shared.full, increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def copy_heads(shared, PART: gl.constexpr, task, C: gl.constexpr):
    """Copy this part's rows of q and dout to shared memory."""
    BLOCKS: gl.constexpr = C.blocks
    PART_HEADS: gl.constexpr = C.PART_HEADS
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    offs_h = task.first_head + PART * PART_HEADS + gl.arange(0, PART_HEADS, layout=ROWS)
    ok = offs_h < C.HEADS
    rows = task.q_row + offset_of(offs_h, C.Q_STRIDE_H, C.HEADS)
    for block in gl.static_range(BLOCKS):
        copy_columns(rows, ok, shared.q.index(PART * BLOCKS + block), block * BLOCK_DIMS)
    rows = task.dout_row + offset_of(offs_h, C.DOUT_STRIDE_H, C.HEADS)
    for block in gl.static_range(VALUE_BLOCKS):
        copy_columns(rows, ok, shared.dout.index(PART * VALUE_BLOCKS + block), block * BLOCK_DIMS)
    async_copy.commit_group()
    offs_h = (
        task.first_head + PART * PART_HEADS + gl.arange(0, PART_HEADS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    )
    ok = offs_h < C.HEADS
    # A head that is none has no probabilities.
    shared.rows.index(PART * 4).store(gl.load(task.total + offs_h, mask=ok, other=float("inf")))
    shared.rows.index(PART * 4 + 1).store(gl.load(task.delta + offs_h, mask=ok, other=0.0))
    if C.OWN_LSE:
        lse = gl.load(task.lse + offs_h, mask=ok, other=float("inf")) * C.LSE_UNIT
        dlse = gl.load(task.dlse + offs_h, mask=ok, other=0.0) * (LOG2E / C.LSE_UNIT)
        shared.rows.index(PART * 4 + 2).store(lse)
        shared.rows.index(PART * 4 + 3).store(dlse)
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(shared.q_full, count=1)
    mbarrier.wait(shared.q_full, 0)


@gluon.constexpr_function
def additions(dims):
    """PTX that adds a thread's elements of ADD_LAYOUT to sums of so many dims, in parts as by `lang.sums.parts_of`.

    Element i has row i % 4 and is i // 4 · 8 columns from the thread's first. Operands: an unused result, the sums'
    row, the first column, x and the bits of low parts, of each element. Gluon's own additions branch at each element
    and keep all addresses in registers. Here x is added to the low words first; where it has a high part, which is
    seldom, that is moved to the high words. It does not matter that low words overflow between.
    """
    count, rows = ADDED.value, range(4)
    (row, column, x, bits) = (lambda i, operand=operand: f"${operand * count + i}" for operand in range(1, 5))
    lines = [".reg .pred more;", ".reg .b32 t, half<4>, seen<4>;", ".reg .b64 wide, lane, sums<4>;"]
    lines += [f"cvt.u64.u32 lane, {column(0)};", "shl.b64 lane, lane, 2;"]
    for i in rows:
        lines += [f"add.s32 half{i}, {bits(i)}, -1;", f"shl.b32 half{i}, 1, half{i};", f"mov.b32 seen{i}, 0;"]
        lines += [f"add.u64 sums{i}, {row(i)}, lane;"]
    for i in range(count):
        lines += [f"red.relaxed.gpu.global.add.s32 [sums{i % 4} + {i // 4 * 8 * 4}], {x(i)};", f"mov.b32 ${i}, 0;"]
        lines += [f"add.s32 t, {x(i)}, half{i % 4};", f"or.b32 seen{i % 4}, seen{i % 4}, t;"]
    lines += [f"shr.u32 seen{i}, seen{i}, {bits(i)};" for i in rows]
    lines += [f"or.b32 seen0, seen0, seen{i};" for i in rows[1:]]
    lines += ["setp.eq.s32 more, seen0, 0;", "@more bra done;"]
    for i in range(count):
        low = f"sums{i % 4} + {i // 4 * 8 * 4}"
        lines += [f"add.s32 t, {x(i)}, half{i % 4};", f"shr.s32 t, t, {bits(i)};", "setp.ne.s32 more, t, 0;"]
        lines += ["cvt.s64.s32 wide, t;", f"shl.b32 t, t, {bits(i)};", "neg.s32 t, t;"]
        lines += [f"@more red.relaxed.gpu.global.add.s32 [{low}], t;", f"add.u64 sums{i % 4}, sums{i % 4}, lane;"]
        lines += [f"@more red.relaxed.gpu.global.add.u64 [sums{i % 4} + {4 * dims + i // 4 * 8 * 8}], wide;"]
        lines += [f"sub.u64 sums{i % 4}, sums{i % 4}, lane;"]
    return "\n".join(["{", *lines, "done:", "}"])


@gluon.jit
def add_piece(acc, sums, unit, bits, PIECE: gl.constexpr, DIMS: gl.constexpr):
    """Add a piece of dims to the sums of a tile's entries, as `backward.kernels.add_to_sums`."""
    x = gl.floor(acc * gl.expand_dims(unit, 1) + 0.5).to(gl.int32)
    column = PIECE * ADDED_DIMS + gl.arange(0, ADDED_DIMS, layout=gl.SliceLayout(0, ADD_LAYOUT)) % 8
    rows = gl.expand_dims(sums.to(gl.uint64, bitcast=True), 1)
    gl.inline_asm_elementwise(
        additions(DIMS),
        OPERANDS,
        [rows, gl.expand_dims(column, 0), x, gl.expand_dims(bits, 1)],
        dtype=gl.int32,
        is_pure=False,
        pack=ADDED,
    )


@gluon.jit
def columns(rows, PIECE: gl.constexpr):
    """A piece of the columns of a block."""
    return rows.slice(PIECE * ADDED_DIMS % BLOCK_DIMS, ADDED_DIMS, 1)


@gluon.jit
def multiply_piece(shared, zero, PIECE: gl.constexpr, C: gl.constexpr):
    """Start P·dout + dS·q of a piece of dims, [TILE_KEYS, ADDED_DIMS], summed over all heads of the CTA."""
    BLOCKS: gl.constexpr = C.blocks
    BLOCK: gl.constexpr = PIECE * ADDED_DIMS // BLOCK_DIMS
    acc = gl.zeros([TILE_KEYS, ADDED_DIMS], gl.float32, D_LAYOUT)
    for part in gl.static_range(2):
        q = columns(shared.q.index(zero + part * BLOCKS + BLOCK), PIECE)
        acc = warpgroup_mma(shared.ds.index(zero + part), q, acc, use_acc=part > 0, is_async=True)
    if BLOCK < VALUE_BLOCKS:
        for part in gl.static_range(2):
            dout = columns(shared.dout.index(zero + part * VALUE_BLOCKS + BLOCK), PIECE)
            acc = warpgroup_mma(shared.p.index(zero + part), dout, acc, is_async=True)
    return acc


@gluon.jit
def differentiate(main, tiles, shared, PART: gl.constexpr, task, C: gl.constexpr):
    BLOCKS: gl.constexpr = C.blocks
    PART_HEADS: gl.constexpr = C.PART_HEADS
    S_LAYOUT: gl.constexpr = scores_layout(PART_HEADS)
    DQ_LAYOUT: gl.constexpr = S_LAYOUT
    DTYPE: gl.constexpr = task.q_row.dtype.element_ty
    KEYS: gl.constexpr = gl.SliceLayout(1, ADD_LAYOUT)
    PIECES: gl.constexpr = C.LAYOUT.dims // ADDED_DIMS
    HALF: gl.constexpr = VALUE_DIMS // ADDED_DIMS // 2
    FIRST: gl.constexpr = 0 if PART == 1 else HALF
    LAST: gl.constexpr = HALF if PART == 1 else PIECES

    copy_heads(shared, PART, task, C)
    HEADS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dq = ()
    for _ in gl.static_range(BLOCKS):
        dq += (gl.zeros([BLOCK_DIMS, PART_HEADS], gl.float32, DQ_LAYOUT),)
    empty = gl.zeros([TILE_KEYS, PART_HEADS], gl.float32, S_LAYOUT)
    for tile in tl.range(0, tiles, disable_licm=True):
        slot = load_slots(main, None, 0, tile, gl.SliceLayout(1, S_LAYOUT))
        ok = (slot >= 0) & (slot < main.num_slots)
        zero = hidden_zero(tile)
        mbarrier.wait(shared.full, tile & 1)
        fence_async_shared()
        s, dp = empty, empty
        for block in gl.static_range(BLOCKS):
            q = shared.q.index(zero + PART * BLOCKS + block).permute((1, 0))
            s = warpgroup_mma(shared.entries.index(zero + block), q, s, use_acc=block > 0, is_async=True)
        zero = hidden_zero(tile)
        for block in gl.static_range(VALUE_BLOCKS):
            dout = shared.dout.index(zero + PART * VALUE_BLOCKS + block).permute((1, 0))
            dp = warpgroup_mma(shared.entries.index(zero + block), dout, dp, use_acc=block > 0, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        s = s * (C.SCALE * LOG2E)
        p = exp2(s - gl.expand_dims(shared.rows.index(PART * 4).load(HEADS), 0))
        ds = p * (dp - gl.expand_dims(shared.rows.index(PART * 4 + 1).load(HEADS), 0))
        if C.OWN_LSE:  # the lse's derivative is not the probability in out
            lse = shared.rows.index(PART * 4 + 2).load(HEADS)
            dlse = shared.rows.index(PART * 4 + 3).load(HEADS)
            ds += exp2(s - gl.expand_dims(lse, 0)) * gl.expand_dims(dlse, 0)
        ds = ds * C.SCALE
        # The unit is chosen for probabilities; of another call's lse they may be anything.
        wrong = gl.max(gl.where((p <= 2.0) & (gl.abs(ds) < float("inf")), 0, 1), 1)
        ds = gl.where(gl.expand_dims(ok, 1), ds, 0.0)
        mbarrier.wait(shared.p_empty, (tile & 1) ^ 1)
        shared.wrong.index(PART).store(wrong)
        shared.p.index(PART).store(p.to(DTYPE))
        shared.ds.index(PART).store(ds.to(DTYPE))
        fence_async_shared()
        mbarrier.arrive(shared.p_full, count=1)

        # Of the entries whose gradients this thread adds.
        slot = load_slots(main, None, 0, tile, KEYS)
        ok = (slot >= 0) & (slot < main.num_slots)
        unit = power_of_two(exponent_within(gl.load(task.bounds + slot, mask=ok, other=0), SUMMAND_BITS))
        # Another CTA may have stored NOT_A_NUMBER there; then what is added does not matter.
        bits = low_bits(gl.load(task.references + slot, mask=ok, other=1) * C.HEAD_BLOCKS)
        # 0 is added for invalid slots, to rows of entries that differ, for the sake of speed.
        place = gl.where(ok, slot, (tile * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=KEYS)) % main.num_slots)
        sums = task.sums + offset_of(place, WORDS * C.LAYOUT.dims)
        mbarrier.wait(shared.p_full, tile & 1)
        wrong = shared.wrong.index(0).load(KEYS) | shared.wrong.index(1).load(KEYS)
        if PART == 1:
            mark = gl.full([TILE_KEYS], NOT_A_NUMBER, gl.int32, KEYS)
            gl.store(task.references + slot, mark, mask=ok & (wrong != 0))
        unit = gl.where(ok & (wrong == 0), unit, 0.0)  # 0 is added
        # The first piece is added while dq is multiplied, and each other one while the next is.
        running = multiply_piece(shared, hidden_zero(tile), FIRST, C)
        more = ()
        zero = hidden_zero(tile)
        for block in gl.static_range(BLOCKS):
            keys = shared.entries.index(zero + block).permute((1, 0))
            more += (warpgroup_mma(keys, shared.ds.index(zero + PART), dq[block], is_async=True),)
        acc = gl.convert_layout(warpgroup_mma_wait(BLOCKS, deps=[running]), ADD_LAYOUT)
        add_piece(acc, sums, unit, bits, FIRST, C.LAYOUT.dims)
        dq = warpgroup_mma_wait(0, deps=more)
        mbarrier.arrive(shared.empty, count=1)
        for piece in gl.static_range(FIRST + 1, LAST):
            running = multiply_piece(shared, hidden_zero(tile), piece, C)
            acc = gl.convert_layout(warpgroup_mma_wait(0, deps=[running]), ADD_LAYOUT)
            if piece == LAST - 1:
                mbarrier.arrive(shared.p_empty, count=1)
            add_piece(acc, sums, unit, bits, piece, C.LAYOUT.dims)

    # Through the shared memory of q, so that stores are of whole rows.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mbarrier.wait(shared.p_empty, (tiles & 1) ^ 1)
    offs_h = task.first_head + PART * PART_HEADS + gl.arange(0, PART_HEADS, layout=gl.SliceLayout(1, ROWS))
    for block in gl.static_range(BLOCKS):
        staged = shared.q.index(PART * BLOCKS + block)
        staged.permute((1, 0)).store(dq[block].to(DTYPE))
    gl.barrier()
    for block in gl.static_range(BLOCKS):
        rows = shared.q.index(PART * BLOCKS + block).load(ROWS)
        dims = block * BLOCK_DIMS + gl.arange(0, BLOCK_DIMS, layout=gl.SliceLayout(0, ROWS))
        ptrs = task.dq_row + gl.expand_dims(offset_of(offs_h, C.LAYOUT.dims, C.HEADS), 1) + gl.expand_dims(dims, 0)
        gl.store(ptrs, rows, mask=gl.expand_dims(offs_h < C.HEADS, 1))


@gluon.jit(do_not_specialize=["num_slots", "num_keys", "slot_stride"])
def sparse_mla_backward_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    dout_ptr,  # [T, H, LANES]
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    lse_ptr,  # [T, H] f32 if OWN_LSE
    dlse_ptr,  # [T, H] f32 if OWN_LSE
    bounds_ptr,  # [P, R] i32
    total_ptr,  # [T, H] f32
    delta_ptr,  # [T, H] f32
    num_slots,
    num_keys,  # K
    slot_stride,
    references_ptr,  # [P, R] i32
    sums_ptr,  # [P, R, WORDS·ROW] i32
    dq_ptr,  # [T, H, L+E]
    Q_STRIDE_T: gl.constexpr,
    Q_STRIDE_H: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
    DOUT_STRIDE_T: gl.constexpr,
    DOUT_STRIDE_H: gl.constexpr,
    LSE_STRIDE: gl.constexpr,
    DLSE_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    OWN_LSE: gl.constexpr,
    SCALE: gl.constexpr,
    LSE_UNIT: gl.constexpr,
    BLOCK_H: gl.constexpr,
):
    HEAD_BLOCKS: gl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    PART_HEADS: gl.constexpr = BLOCK_H // 2
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    C: gl.constexpr = constants(
        LAYOUT,
        PAGE_STRIDE,
        PAGE_SIZE,
        HEADS,
        Q_STRIDE_H,
        DOUT_STRIDE_H,
        OWN_LSE,
        SCALE,
        LSE_UNIT,
        PART_HEADS,
        HEAD_BLOCKS,
    )
    BLOCKS: gl.constexpr = C.blocks
    token = (gl.program_id(0) // HEAD_BLOCKS).to(gl.int64)
    place = offset_of(token, HEADS)
    end = num_keys
    if HAS_LENGTHS:
        end = gl.minimum(gl.load(lengths_ptr + token), num_keys)
    tiles = gl.cdiv(gl.maximum(end, 0), TILE_KEYS)
    main = Source(cache_ptr, slots_ptr + offset_of(token, slot_stride), num_slots, 0, end)
    task = Task(
        q_ptr + offset_of(token, Q_STRIDE_T),
        dout_ptr + offset_of(token, DOUT_STRIDE_T),
        total_ptr + place,
        delta_ptr + place,
        lse_ptr + offset_of(token, LSE_STRIDE),
        dlse_ptr + offset_of(token, DLSE_STRIDE),
        bounds_ptr,
        references_ptr,
        sums_ptr,
        dq_ptr + offset_of(place, LAYOUT.dims),
        gl.program_id(0) % HEAD_BLOCKS * BLOCK_H,
    )
    ROW: gl.constexpr = columns_of(BLOCK_DIMS)
    TILE: gl.constexpr = columns_of(PART_HEADS)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = Shared(
        entries=gl.allocate_shared_memory(DTYPE, [BLOCKS, TILE_KEYS, BLOCK_DIMS], ROW),
        q=gl.allocate_shared_memory(DTYPE, [2 * BLOCKS, PART_HEADS, BLOCK_DIMS], ROW),
        dout=gl.allocate_shared_memory(DTYPE, [2 * VALUE_BLOCKS, PART_HEADS, BLOCK_DIMS], ROW),
        p=gl.allocate_shared_memory(DTYPE, [2, TILE_KEYS, PART_HEADS], TILE),
        ds=gl.allocate_shared_memory(DTYPE, [2, TILE_KEYS, PART_HEADS], TILE),
        rows=gl.allocate_shared_memory(gl.float32, [8, PART_HEADS], LINE),
        wrong=gl.allocate_shared_memory(gl.int32, [2, TILE_KEYS], LINE),
        q_full=mbarrier.allocate_mbarrier(),
        full=mbarrier.allocate_mbarrier(),
        empty=mbarrier.allocate_mbarrier(),
        p_full=mbarrier.allocate_mbarrier(),
        p_empty=mbarrier.allocate_mbarrier(),
    )
    mbarrier.init(shared.full, count=128)
    mbarrier.init(shared.q_full, count=2)
    mbarrier.init(shared.empty, count=2)
    mbarrier.init(shared.p_full, count=2)
    mbarrier.init(shared.p_empty, count=2)
    gl.warp_specialize(
        [
            (differentiate, (main, tiles, shared, gl.constexpr(0), task, C)),
            (differentiate, (main, tiles, shared, gl.constexpr(1), task, C)),
            (gather, (main, tiles, shared, C)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
