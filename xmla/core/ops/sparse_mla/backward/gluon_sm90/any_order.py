"""The derivative of attention over plain rows on Hopper, in Gluon, that adds to entries' gradients in any order.

A CTA has a block of heads of a token and all its keys, a tile at a time, on four warpgroups, as in `kernel.py`:
- `gather` copies a tile's entries as soon as dq has been multiplied with those of the tile before.
- `score` computes S = q·Kᵀ and dP = dout·Vᵀ of a tile, and so P and dS, which it hands over.
- Two, `differentiate`, have half of the dims each, of the roped ones too: of dq += dS·K, and of entries' gradients
  dSᵀ·q + Pᵀ·dout, a piece of dims at a time.

Additions are float32, 16 bytes a lane, and limit the speed: at no time should none be under way. So a tile's last piece
is added while dq is multiplied with the next one. An addition needs nothing of an entry but its address, so that a tile
can have 64 keys as the rows of a product, and operands are read from shared memory no faster than it gives them. A row
of an accumulator is in four lanes, 64 bytes of an addition; neighbouring rows exchange halves, so that requests have
128.
See benchmarks/log/training.md.
"""

from typing import Any, NamedTuple

from triton import language as tl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.sparse_mla.backward.gluon_sm90.common import (
    DIFFERENTIATE_REGISTERS,
    DQ_LAYOUT,
    GATHER_REGISTERS,
    PIECE_DIMS,
    SCORE_REGISTERS,
    VALUE_PIECES,
    columns_of,
    copy_rows,
    derive,
    load_rows,
    rows_of,
    start,
    store_dims,
)
from xmla.core.ops.sparse_mla.backward.kernels import MOST_PROBABLE
from xmla.core.ops.sparse_mla.gluon_sm90.common import TILE_HEADS, VALUE_DIMS, offsets
from xmla.core.ops.sparse_mla.gluon_sm90.plain import copy_columns

TILE_KEYS = gl.constexpr(64)
HALF_KEYS = gl.constexpr(TILE_KEYS.value // 2)
SUM_DIMS = gl.constexpr(PIECE_DIMS.value // 2)  # that are summed over heads at a time, and roped dims of a warpgroup
SUM_PIECES = gl.constexpr(VALUE_DIMS.value // SUM_DIMS.value)
TARGETS = gl.constexpr(2)  # tiles of which it is known where to add

S_LAYOUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_KEYS.value, 16])
)
SUM_LAYOUT = gl.constexpr(  # of a tile's keys against dims, and of heads against a warpgroup's roped dims
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SUM_DIMS.value, 16])
)


class Shared(NamedTuple):
    """Shared memory and its mbarriers."""

    entries: Any  # [piece, TILE_KEYS, PIECE_DIMS]
    entries_tail: Any  # [half, TILE_KEYS, SUM_DIMS] if LAYOUT.tail
    q: Any  # [piece, TILE_HEADS, SUM_DIMS]
    dout: Any  # [piece, TILE_HEADS, SUM_DIMS]
    p: Any  # [TILE_HEADS, TILE_KEYS]
    ds: Any  # [TILE_HEADS, TILE_KEYS]
    place: Any  # [tile % TARGETS, TILE_KEYS] i32: the entry to which gradients are added, or −1
    q_full: Any
    full: Any
    empty: Any
    p_full: Any
    p_empty: Any


@gluon.jit
def copy_half(slots, shared, HALF: gl.constexpr, task, C: gl.constexpr):
    """Start copies of the entries of half a tile, whose `slots` are in shared memory."""
    FIRST: gl.constexpr = HALF * HALF_KEYS
    slots = slots.slice(FIRST, HALF_KEYS, 0)
    slot = slots.load(gl.SliceLayout(1, rows_of(PIECE_DIMS)))
    data, _ = offsets(slot, C.LAYOUT, C.SOURCE.PAGE_STRIDE, C.SOURCE.PAGE_SIZE)
    for piece in gl.static_range(VALUE_PIECES):
        rows = shared.entries.index(piece).slice(FIRST, HALF_KEYS, 0)
        copy_columns(task.cache + data, slot >= 0, rows, piece * PIECE_DIMS)
    if C.LAYOUT.tail:
        slot = slots.load(gl.SliceLayout(1, rows_of(SUM_DIMS)))
        data, _ = offsets(slot, C.LAYOUT, C.SOURCE.PAGE_STRIDE, C.SOURCE.PAGE_SIZE)
        for part in gl.static_range(2):
            rows = shared.entries_tail.index(part).slice(FIRST, HALF_KEYS, 0)
            copy_columns(task.cache + data, slot >= 0, rows, VALUE_DIMS + part * SUM_DIMS)


@gluon.jit
def gather(tiles, shared, task, C: gl.constexpr):
    """Copy each tile's entries, and say where their gradients are added."""
    key = gl.arange(0, TILE_KEYS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for tile in range(0, tiles):
        offs = tile * TILE_KEYS + key
        slot = gl.load(task.slots + offs, mask=offs < task.end, other=-1)
        place = shared.place.index(tile % TARGETS)  # nobody has asked for the tile before the last since its entries
        place.store(gl.where((slot >= 0) & (slot < task.num_slots), slot, -1))
        mbarrier.wait(shared.empty, (tile & 1) ^ 1)
        copy_half(place, shared, 0, task, C)
        copy_half(place, shared, 1, task, C)
        async_copy.mbarrier_arrive(shared.full, increment_count=False)
        mbarrier.arrive(shared.full, count=1)
    async_copy.wait_group(0)


@gluon.jit
def score(tiles, shared, task, C: gl.constexpr):
    """P and dS of each tile."""
    DTYPE: gl.constexpr = task.q_row.dtype.element_ty
    KEYS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    offs_h = task.first_head + gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, S_LAYOUT))
    total, delta, lse, dlse = load_rows(task, offs_h, C)
    empty = gl.zeros([TILE_HEADS, TILE_KEYS], gl.float32, S_LAYOUT)
    mbarrier.wait(shared.q_full, 0)
    for tile in tl.range(0, tiles, disable_licm=True):
        mbarrier.wait(shared.full, tile & 1)
        fence_async_shared()
        s, dp = empty, empty
        for piece in gl.static_range(SUM_PIECES):
            keys = shared.entries.index(piece // 2).slice(piece % 2 * SUM_DIMS, SUM_DIMS, 1).permute((1, 0))
            s = warpgroup_mma(shared.q.index(piece), keys, s, use_acc=piece > 0, is_async=True)
            dp = warpgroup_mma(shared.dout.index(piece), keys, dp, use_acc=piece > 0, is_async=True)
        if C.LAYOUT.tail:
            for part in gl.static_range(2):
                keys = shared.entries_tail.index(part).permute((1, 0))
                s = warpgroup_mma(shared.q.index(SUM_PIECES + part), keys, s, is_async=True)
        scores, dp = warpgroup_mma_wait(0, deps=[s, dp])
        key_ok = shared.place.index(tile % TARGETS).load(KEYS) >= 0
        mbarrier.arrive(shared.empty, count=1)
        p, ds, greatest = derive(scores, dp, total, delta, lse, dlse, C)
        ds = ds * C.SCALE  # what is not finite makes an entry's whole gradient NaN
        ds = gl.where((greatest <= MOST_PROBABLE) & (gl.abs(ds) < float("inf")), ds, float("nan"))
        ds = gl.where(gl.expand_dims(key_ok, 0), ds, 0.0)
        mbarrier.wait(shared.p_empty, (tile & 1) ^ 1)
        shared.p.store(p.to(DTYPE))
        shared.ds.store(ds.to(DTYPE))
        fence_async_shared()
        mbarrier.arrive(shared.p_full, count=1)


@gluon.constexpr_function
def additions():
    """PTX that adds a thread's elements of keys against SUM_DIMS dims to sums, FOURS as `store_sums_kernel` says.

    Element i has key i // 2 % 2 · 8 and dim i // 4 · 8 + i % 2 from the thread's first. Operands: unused results, x,
    and the addresses of rows, 0 for one to which nothing is added. A lane has 8 elements of each of its two rows: four
    for its place in the first half of a line of 128 bytes, four for that in the second half. Quads of lanes with even
    and odd rows exchange halves: together they add the line of the even row, then that of the odd one.
    """
    count = SUM_DIMS.value // 2
    skipped = count // 4
    x, row = (lambda i, operand=o: f"${skipped + operand * count + i}" for o in range(2))

    def exchanged(to):
        return f"shfl.sync.bfly.b32 {to}, {to}, 4, 31, 0xffffffff;"

    lines = [".reg .pred odd, more;", ".reg .b32 lane, low, high, a<4>, b<4>;", ".reg .b64 own, even, uneven;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(skipped)]
    lines += ["mov.u32 lane, %laneid;", "and.b32 low, lane, 4;", "setp.ne.b32 odd, low, 0;", "and.b32 lane, lane, 7;"]
    for key in range(2):
        lines += [f"mov.b64 own, {row(2 * key)};", "mov.b64 {low, high}, own;", exchanged("low"), exchanged("high")]
        lines += ["mov.b64 uneven, {low, high};", "selp.b64 even, uneven, own, odd;"]
        lines += ["selp.b64 uneven, own, uneven, odd;"]
        first, second = ([x(8 * half + 4 * (i // 2) + 2 * key + i % 2) for i in range(4)] for half in range(2))
        for i in range(4):
            lines += [f"selp.f32 b{i}, {first[i]}, {second[i]}, odd;", exchanged(f"b{i}")]
            lines += [f"selp.f32 a{i}, b{i}, {first[i]}, odd;", f"selp.f32 b{i}, {second[i]}, b{i}, odd;"]
        for line, values in (("even", "a"), ("uneven", "b")):
            lines += [f"setp.ne.b64 more, {line}, 0;", f"mad.wide.u32 {line}, lane, 16, {line};"]
            four = ", ".join(f"{values}{i}" for i in range(4))
            lines += [f"@more red.relaxed.gpu.global.add.v4.f32 [{line}], {{{four}}};"]
    return "\n".join(["{", *lines, "}"])


OPERANDS = gl.constexpr(",".join(f"{kind}" for kind, count in (("=&r", 4), ("f", 16), ("l", 16)) for _ in range(count)))


@gluon.jit
def add_dims(acc, place, first, task, C: gl.constexpr):
    """Add keys' dims `first` … to the sums of the entries at `place`."""
    sums = (task.sums + offset_of(place, C.LAYOUT.dims) + first).to(gl.uint64, bitcast=True)
    rows = gl.expand_dims(gl.where(place >= 0, sums, 0), 1)
    gl.inline_asm_elementwise(additions(), OPERANDS, [acc, rows], dtype=gl.int8, is_pure=False, pack=SUM_DIMS // 2)


@gluon.jit
def start_sums(factors, rows, acc, use_acc: gl.constexpr, C: gl.constexpr):
    """Start acc + factorsᵀ·rows [TILE_KEYS, SUM_DIMS], sums over heads."""
    HEADS: gl.constexpr = C.SUMMED_HEADS
    factors, rows = factors.slice(0, HEADS, 0).permute((1, 0)), rows.slice(0, HEADS, 0)
    return warpgroup_mma(factors, rows, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def multiply_piece(shared, empty, piece, C: gl.constexpr):
    """dSᵀ·q + Pᵀ·dout of a piece of dims, [TILE_KEYS, SUM_DIMS]."""
    acc = start_sums(shared.ds, shared.q.index(piece), empty, False, C)
    acc = start_sums(shared.p, shared.dout.index(piece), acc, True, C)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def differentiate(tiles, shared, PART: gl.constexpr, task, C: gl.constexpr):
    """The left (0) or right (1) half of the dims of gradients, and half of the roped ones."""
    KEYS: gl.constexpr = gl.SliceLayout(1, SUM_LAYOUT)
    FIRST: gl.constexpr = PART * (SUM_PIECES // 2)
    LAST: gl.constexpr = FIRST + SUM_PIECES // 2 - 1
    TAIL: gl.constexpr = SUM_PIECES + PART
    DQ: gl.constexpr = PART * (VALUE_PIECES // 2)
    if PART == 0:
        copy_rows(task.q_row, task.first_head, shared.q, C.LAYOUT.dims // SUM_DIMS, C.Q_STRIDE_H, C)
    else:
        copy_rows(task.dout_row, task.first_head, shared.dout, SUM_PIECES, C.DOUT_STRIDE_H, C)
    mbarrier.arrive(shared.q_full, count=1)
    mbarrier.wait(shared.q_full, 0)
    empty = gl.zeros([TILE_KEYS, SUM_DIMS], gl.float32, SUM_LAYOUT)
    zeros = gl.zeros([TILE_HEADS, PIECE_DIMS], gl.float32, DQ_LAYOUT)
    dq0, dq1, dq2, dq3 = zeros, zeros, zeros, zeros
    dq_tail = gl.zeros([TILE_HEADS, SUM_DIMS], gl.float32, SUM_LAYOUT)
    acc = empty  # the last piece of the tile before
    place = gl.full([TILE_KEYS], -1, gl.int32, KEYS)
    for tile in tl.range(0, tiles, disable_licm=True):
        mbarrier.wait(shared.full, tile & 1)
        mbarrier.wait(shared.p_full, tile & 1)
        fence_async_shared()
        dq0 = warpgroup_mma(shared.ds, shared.entries.index(DQ), dq0, is_async=True)
        dq1 = warpgroup_mma(shared.ds, shared.entries.index(DQ + 1), dq1, is_async=True)
        dq2 = warpgroup_mma(shared.ds, shared.entries.index(DQ + 2), dq2, is_async=True)
        dq3 = warpgroup_mma(shared.ds, shared.entries.index(DQ + 3), dq3, is_async=True)
        if C.LAYOUT.tail:
            dq_tail = warpgroup_mma(shared.ds, shared.entries_tail.index(PART), dq_tail, is_async=True)
        add_dims(acc, place, LAST * SUM_DIMS, task, C)
        place = shared.place.index(tile % TARGETS).load(KEYS)
        if C.LAYOUT.tail:
            dq0, dq1, dq2, dq3, dq_tail = warpgroup_mma_wait(0, deps=[dq0, dq1, dq2, dq3, dq_tail])
        else:
            dq0, dq1, dq2, dq3 = warpgroup_mma_wait(0, deps=[dq0, dq1, dq2, dq3])
        mbarrier.arrive(shared.empty, count=1)
        if C.LAYOUT.tail:
            tail = start_sums(shared.ds, shared.q.index(TAIL), empty, False, C)
            add_dims(warpgroup_mma_wait(0, deps=[tail]), place, TAIL * SUM_DIMS, task, C)
        for piece in range(FIRST, LAST):
            add_dims(multiply_piece(shared, empty, piece, C), place, piece * SUM_DIMS, task, C)
        acc = multiply_piece(shared, empty, LAST, C)
        mbarrier.arrive(shared.p_empty, count=1)
    add_dims(acc, place, LAST * SUM_DIMS, task, C)

    # Nobody reads these dims of entries any more: dq goes through them, so that stores are of whole rows.
    store_dims(dq0, shared.entries.index(DQ), DQ * PIECE_DIMS, task, C)
    store_dims(dq1, shared.entries.index(DQ + 1), (DQ + 1) * PIECE_DIMS, task, C)
    store_dims(dq2, shared.entries.index(DQ + 2), (DQ + 2) * PIECE_DIMS, task, C)
    store_dims(dq3, shared.entries.index(DQ + 3), (DQ + 3) * PIECE_DIMS, task, C)
    if C.LAYOUT.tail:
        store_dims(dq_tail, shared.entries_tail.index(PART), TAIL * SUM_DIMS, task, C)


@gluon.jit
def sparse_mla_backward_any_order_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    dout_ptr,  # [T, H, LANES]
    lengths_ptr,  # [T] i32 if SOURCE.HAS_LENGTHS
    lse_ptr,  # [T, H] f32 if OWN_LSE
    dlse_ptr,  # [T, H] f32 if OWN_LSE
    total_ptr,  # [T, H] f32
    delta_ptr,  # [T, H] f32
    num_slots,
    num_keys,  # K
    slot_stride,
    sums_ptr,  # [P, R, ROW] f32
    dq_ptr,  # [T, H, L+E]
    C: gl.constexpr,  # HopperProducts
):
    task, tiles = start(
        q_ptr, cache_ptr, slots_ptr, dout_ptr, lengths_ptr, lse_ptr, dlse_ptr, total_ptr, delta_ptr, num_slots,
        num_keys, slot_stride, sums_ptr, dq_ptr, None, None, TILE_KEYS, C,
    )  # fmt: skip
    LAYOUT: gl.constexpr = C.LAYOUT
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    ROW: gl.constexpr = columns_of(SUM_DIMS)
    entries = gl.allocate_shared_memory(DTYPE, [VALUE_PIECES, TILE_KEYS, PIECE_DIMS], columns_of(PIECE_DIMS))
    entries_tail = entries
    if LAYOUT.tail:
        entries_tail = gl.allocate_shared_memory(DTYPE, [2, TILE_KEYS, SUM_DIMS], ROW)
    shared = Shared(
        entries=entries,
        entries_tail=entries_tail,
        q=gl.allocate_shared_memory(DTYPE, [LAYOUT.dims // SUM_DIMS, TILE_HEADS, SUM_DIMS], ROW),
        dout=gl.allocate_shared_memory(DTYPE, [SUM_PIECES, TILE_HEADS, SUM_DIMS], ROW),
        p=gl.allocate_shared_memory(DTYPE, [TILE_HEADS, TILE_KEYS], columns_of(TILE_KEYS)),
        ds=gl.allocate_shared_memory(DTYPE, [TILE_HEADS, TILE_KEYS], columns_of(TILE_KEYS)),
        place=gl.allocate_shared_memory(gl.int32, [TARGETS, TILE_KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        q_full=mbarrier.allocate_mbarrier(),
        full=mbarrier.allocate_mbarrier(),
        empty=mbarrier.allocate_mbarrier(),
        p_full=mbarrier.allocate_mbarrier(),
        p_empty=mbarrier.allocate_mbarrier(),
    )
    mbarrier.init(shared.q_full, count=2)
    mbarrier.init(shared.full, count=128 + 1)
    mbarrier.init(shared.empty, count=3)
    mbarrier.init(shared.p_full, count=1)
    mbarrier.init(shared.p_empty, count=2)
    gl.warp_specialize(
        [
            (differentiate, (tiles, shared, gl.constexpr(1), task, C)),
            (differentiate, (tiles, shared, gl.constexpr(0), task, C)),
            (score, (tiles, shared, task, C)),
            (gather, (tiles, shared, task, C)),
        ],
        [4, 4, 4],
        [DIFFERENTIATE_REGISTERS, SCORE_REGISTERS, GATHER_REGISTERS],
    )
