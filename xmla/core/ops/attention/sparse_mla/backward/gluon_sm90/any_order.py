"""The derivative of attention over plain rows on Hopper, in Gluon, that adds to entries' gradients in any order.

A CTA has a block of heads of a token and all its keys, a tile at a time, on three warpgroups:
- `score` copies a tile's entries, computes S = q·Kᵀ and dP = dout·Vᵀ, and so P and dS, which it hands over.
- Two, `differentiate`, have half of the dims each, of the roped ones too: of dq += dS·K, and of entries' gradients
  dSᵀ·q + Pᵀ·dout, a piece of dims at a time.

An arrow goes from who arrives at a barrier to who waits for it:

              score                             differentiate, twice
    tile t    entries, S, dP → P, dS → p_full ─► dq += dS·K, the last tile's last piece added by one of the two
              entries of t + 1 ◄──────────────── → empty
                                                 dSᵀ·q + Pᵀ·dout of each piece, added
              P, dS of t + 1 ◄────────────────── → p_empty, before the other adds the last piece

Additions are float32, 16 bytes a lane, and limit the speed: at no time should none be under way. An addition needs
nothing of an entry but its address, so that a tile can have 64 keys as the rows of a product, and operands are read
from shared memory no faster than it gives them. A row of an accumulator is in four lanes, 64 bytes of an addition;
neighbouring rows exchange halves, so that requests have 128. The L2 cache keeps sums before all else: they are read and
written, the rest is read. See benchmarks/log/training.md.
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
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.common import (
    PIECE_DIMS,
    VALUE_PIECES,
    against,
    columns_of,
    copy_rows,
    derive,
    load_rows,
    rows_of,
    start,
    store_dims,
)
from xmla.core.ops.attention.sparse_mla.backward.kernels import MOST_PROBABLE
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import TILE_HEADS, VALUE_DIMS, offsets
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import copy_columns

TILE_KEYS = gl.constexpr(64)
HALF_KEYS = gl.constexpr(TILE_KEYS.value // 2)
DQ_DIMS = gl.constexpr(128)  # of dq in a product
DQ_PIECES = gl.constexpr(VALUE_DIMS.value // DQ_DIMS.value)
TAIL_DIMS = gl.constexpr(PIECE_DIMS.value // 2)  # roped dims of a warpgroup
LINE_DIMS = gl.constexpr(32)  # sums in a line of 128 bytes
TARGETS = gl.constexpr(2)  # tiles of which it is known where to add
# Registers per thread; together with the first warpgroup, `differentiate` too, they have 504.
SCORE_REGISTERS = gl.constexpr(104)
DIFFERENTIATE_REGISTERS = gl.constexpr(200)


class Shared(NamedTuple):
    """Shared memory and its mbarriers."""

    entries: Any  # [piece, TILE_KEYS, PIECE_DIMS]
    entries_tail: Any  # [half, TILE_KEYS, TAIL_DIMS] if LAYOUT.tail
    q: Any  # [piece, TILE_HEADS, SUM_DIMS]
    dout: Any  # [piece, TILE_HEADS, SUM_DIMS]
    p: Any  # [TILE_HEADS, TILE_KEYS]
    ds: Any  # [TILE_HEADS, TILE_KEYS]
    slot: Any  # [tile % TARGETS, TILE_KEYS] i32, −1 past the last
    even: Any  # the same of the even one of each key's pair of neighbours
    odd: Any  # and of the odd one
    q_full: Any
    empty: Any
    p_full: Any
    p_empty: Any


S_LAYOUT = gl.constexpr(against.fn(TILE_KEYS.value))


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
        slot = slots.load(gl.SliceLayout(1, rows_of(TAIL_DIMS)))
        data, _ = offsets(slot, C.LAYOUT, C.SOURCE.PAGE_STRIDE, C.SOURCE.PAGE_SIZE)
        for part in gl.static_range(2):
            rows = shared.entries_tail.index(part).slice(FIRST, HALF_KEYS, 0)
            copy_columns(task.cache + data, slot >= 0, rows, VALUE_DIMS + part * TAIL_DIMS)


@gluon.jit
def load_slots(offs, task):
    return gl.load(task.slots + offs, mask=offs < task.end, other=-1)


@gluon.jit
def gather(tile, shared, task, C: gl.constexpr):
    """Copy a tile's entries, and say where their gradients are added."""
    offs = tile * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    slot, even, odd = load_slots(offs, task), load_slots(offs & ~1, task), load_slots(offs | 1, task)
    target = tile % TARGETS  # nobody asks for the tile before the last since p_empty
    shared.slot.index(target).store(slot)
    shared.even.index(target).store(even)
    shared.odd.index(target).store(odd)
    mbarrier.wait(shared.empty, (tile & 1) ^ 1)
    copy_half(shared.slot.index(target), shared, 0, task, C)
    copy_half(shared.slot.index(target), shared, 1, task, C)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.barrier()


@gluon.jit
def score(tiles, shared, task, C: gl.constexpr):
    """P and dS of each tile."""
    DTYPE: gl.constexpr = task.q_row.dtype.element_ty
    SUM_DIMS: gl.constexpr = C.SUM_DIMS
    SUM_PIECES: gl.constexpr = C.SUM_PIECES
    PER_PIECE: gl.constexpr = PIECE_DIMS // SUM_DIMS
    KEYS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    offs_h = task.first_head + gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, S_LAYOUT))
    total, delta, lse, dlse = load_rows(task, offs_h, C)
    empty = gl.zeros([TILE_HEADS, TILE_KEYS], gl.float32, S_LAYOUT)
    mbarrier.wait(shared.q_full, 0)
    for tile in tl.range(0, tiles, disable_licm=True):
        gather(tile, shared, task, C)
        s, dp = empty, empty
        for piece in gl.static_range(SUM_PIECES):
            keys = shared.entries.index(piece // PER_PIECE)
            if PER_PIECE > 1:
                keys = keys.slice(piece % PER_PIECE * SUM_DIMS, SUM_DIMS, 1)
            keys = keys.permute((1, 0))
            s = warpgroup_mma(shared.q.index(piece), keys, s, use_acc=piece > 0, is_async=True)
            dp = warpgroup_mma(shared.dout.index(piece), keys, dp, use_acc=piece > 0, is_async=True)
        if C.LAYOUT.tail:
            for part in gl.static_range(2):
                keys = shared.entries_tail.index(part).permute((1, 0))
                s = warpgroup_mma(shared.q.index(SUM_PIECES + part), keys, s, is_async=True)
        scores, dp = warpgroup_mma_wait(0, deps=[s, dp])
        key_ok = shared.slot.index(tile % TARGETS).load(KEYS) >= 0
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
def additions(dims):
    """PTX that adds a thread's elements of keys against so many dims to sums, FOURS as `store_sums_kernel` says.

    Element i has key i // 2 % 2 · 8 and dim i // 4 · 8 + i % 2 from the thread's first. Operands: unused results, x,
    and the addresses of rows, 0 for one to which nothing is added: of the even and of the odd one of the key's pair. A
    lane has 8 elements of each of its two rows in a line of 128 bytes: four for its place in the first half, four for
    that in the second half. Quads of lanes with even and odd rows exchange halves: together they add the line of the
    even row, then that of the odd one.
    """
    count = dims // 2
    skipped = count // 4
    x, even, odd = (lambda i, operand=o: f"${skipped + operand * count + i}" for o in range(3))
    lines = [".reg .pred odd, first, second;", ".reg .b32 lane, low, a<4>, b<4>;", ".reg .b64 kept, even, uneven;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(skipped)]
    lines += ["createpolicy.fractional.L2::evict_last.b64 kept;"]
    lines += ["mov.u32 lane, %laneid;", "and.b32 low, lane, 4;", "setp.ne.b32 odd, low, 0;", "and.b32 lane, lane, 7;"]
    for key in range(2):
        for ok, at, row in (("first", "even", even(2 * key)), ("second", "uneven", odd(2 * key))):
            lines += [f"setp.ne.b64 {ok}, {row}, 0;", f"mad.wide.u32 {at}, lane, 16, {row};"]
        for line in range(dims // LINE_DIMS.value):
            own = (16 * line + 2 * key + 8 * half for half in range(2))
            first, second = ([x(i + 4 * (j // 2) + j % 2) for j in range(4)] for i in own)
            for i in range(4):
                lines += [f"selp.f32 b{i}, {first[i]}, {second[i]}, odd;"]
                lines += [f"shfl.sync.bfly.b32 b{i}, b{i}, 4, 31, 0xffffffff;"]
                lines += [f"selp.f32 a{i}, b{i}, {first[i]}, odd;", f"selp.f32 b{i}, {second[i]}, b{i}, odd;"]
            for ok, at, values in (("first", "even", "a"), ("second", "uneven", "b")):
                place, four = f"[{at} + {128 * line}]", ", ".join(f"{values}{i}" for i in range(4))
                lines += [f"@{ok} red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 {place}, {{{four}}}, kept;"]
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def operands(dims):
    count = dims // 2
    return ",".join(
        f"{kind}" for kind, many in (("=&r", count // 4), *((k, count) for k in "fll")) for _ in range(many)
    )


@gluon.jit
def rows_at(slot, first, task, C: gl.constexpr):
    """Addresses of dims `first` … of the sums of entries, 0 for none."""
    sums = (task.sums + offset_of(slot, C.LAYOUT.dims) + first).to(gl.uint64, bitcast=True)
    return gl.expand_dims(gl.where(slot >= 0, sums, 0), 1)


@gluon.jit
def add_dims(acc, even, odd, first, task, C: gl.constexpr):
    """Add keys' dims `first` … to the sums of entries, of which `even` and `odd` are each key's pair."""
    DIMS: gl.constexpr = acc.shape[1]
    even, odd = rows_at(even, first, task, C), rows_at(odd, first, task, C)
    gl.inline_asm_elementwise(
        additions(DIMS), operands(DIMS), [acc, even, odd], dtype=gl.int8, is_pure=False, pack=DIMS // 2
    )


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
    DTYPE: gl.constexpr = task.q_row.dtype.element_ty
    SUM_DIMS: gl.constexpr = C.SUM_DIMS
    SUM_PIECES: gl.constexpr = C.SUM_PIECES
    KEYS: gl.constexpr = gl.SliceLayout(1, against(SUM_DIMS))
    FIRST: gl.constexpr = PART * (SUM_PIECES // 2)
    LAST: gl.constexpr = FIRST + SUM_PIECES // 2 - 1
    TAIL: gl.constexpr = SUM_PIECES + PART
    NEXT: gl.constexpr = FIRST if C.LAYOUT.tail else FIRST + 1  # the first piece that is multiplied after dq
    DQ: gl.constexpr = PART * (DQ_PIECES // 2)
    if PART == 0:
        copy_rows(task.q_row, task.first_head, shared.q, C.LAYOUT.dims // SUM_DIMS, C.Q_STRIDE_H, C)
    else:
        copy_rows(task.dout_row, task.first_head, shared.dout, SUM_PIECES, C.DOUT_STRIDE_H, C)
    mbarrier.arrive(shared.q_full, count=1)
    mbarrier.wait(shared.q_full, 0)
    empty = gl.zeros([TILE_KEYS, SUM_DIMS], gl.float32, against(SUM_DIMS))
    values = shared.entries.reinterpret(DTYPE, [DQ_PIECES, TILE_KEYS, DQ_DIMS], columns_of(PIECE_DIMS))
    dq0 = gl.zeros([TILE_HEADS, DQ_DIMS], gl.float32, against(DQ_DIMS))
    dq1 = dq0
    dq_tail = gl.zeros([TILE_HEADS, TAIL_DIMS], gl.float32, against(TAIL_DIMS))
    acc = empty  # the right half's last piece of the tile before
    even = gl.full([TILE_KEYS], -1, gl.int32, KEYS)
    odd = even
    for tile in tl.range(0, tiles, disable_licm=True):
        mbarrier.wait(shared.p_full, tile & 1)
        fence_async_shared()
        dq0 = warpgroup_mma(shared.ds, values.index(DQ), dq0, is_async=True)
        if PART == 1:
            add_dims(acc, even, odd, LAST * SUM_DIMS, task, C)
        even, odd = shared.even.index(tile % TARGETS).load(KEYS), shared.odd.index(tile % TARGETS).load(KEYS)
        if C.LAYOUT.tail:
            acc = start_sums(shared.ds, shared.q.index(TAIL), empty, False, C)
        dq1 = warpgroup_mma(shared.ds, values.index(DQ + 1), dq1, is_async=True)
        if C.LAYOUT.tail:
            dq_tail = warpgroup_mma(shared.ds, shared.entries_tail.index(PART), dq_tail, is_async=True)
            acc = warpgroup_mma_wait(2, deps=[acc])
            add_dims(acc, even, odd, TAIL * SUM_DIMS, task, C)
            dq0, dq1, dq_tail = warpgroup_mma_wait(0, deps=[dq0, dq1, dq_tail])
        else:
            acc = multiply_piece(shared, empty, FIRST, C)
            dq0, dq1 = warpgroup_mma_wait(0, deps=[dq0, dq1])
        mbarrier.arrive(shared.empty, count=1)
        if not C.LAYOUT.tail:
            add_dims(acc, even, odd, FIRST * SUM_DIMS, task, C)
        for piece in range(NEXT, LAST):
            add_dims(multiply_piece(shared, empty, piece, C), even, odd, piece * SUM_DIMS, task, C)
        acc = multiply_piece(shared, empty, LAST, C)
        mbarrier.arrive(shared.p_empty, count=1)
        if PART == 0:
            add_dims(acc, even, odd, LAST * SUM_DIMS, task, C)
    if PART == 1:
        add_dims(acc, even, odd, LAST * SUM_DIMS, task, C)

    # Nobody reads these dims of entries any more: dq goes through them, so that stores are of whole rows.
    store_dims(dq0, values.index(DQ), DQ * DQ_DIMS, task, C)
    store_dims(dq1, values.index(DQ + 1), (DQ + 1) * DQ_DIMS, task, C)
    if C.LAYOUT.tail:
        store_dims(dq_tail, shared.entries_tail.index(PART), VALUE_DIMS + PART * TAIL_DIMS, task, C)


@gluon.jit
def sparse_mla_backward_any_order_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32, as `order_slots_kernel` says
    dout_ptr,  # [T, H, LANES]
    ends_ptr,  # [T] i32
    lse_ptr,  # [T, H] f32 if OWN_LSE
    dlse_ptr,  # [T, H] f32 if OWN_LSE
    total_ptr,  # [T, H] f32
    delta_ptr,  # [T, H] f32
    num_slots,
    num_keys,  # K
    first_token,
    sums_ptr,  # [P, R, ROW] f32
    dq_ptr,  # [T, H, L+E]
    C: gl.constexpr,  # HopperProducts
):
    task, tiles = start(
        q_ptr, cache_ptr, slots_ptr, dout_ptr, ends_ptr, lse_ptr, dlse_ptr, total_ptr, delta_ptr, num_slots,
        num_keys, first_token, sums_ptr, dq_ptr, None, None, TILE_KEYS, C,
    )  # fmt: skip
    LAYOUT: gl.constexpr = C.LAYOUT
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    SUM_DIMS: gl.constexpr = C.SUM_DIMS
    ROW: gl.constexpr = columns_of(SUM_DIMS)
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    entries = gl.allocate_shared_memory(DTYPE, [VALUE_PIECES, TILE_KEYS, PIECE_DIMS], columns_of(PIECE_DIMS))
    entries_tail = entries
    if LAYOUT.tail:
        entries_tail = gl.allocate_shared_memory(DTYPE, [2, TILE_KEYS, TAIL_DIMS], columns_of(TAIL_DIMS))
    shared = Shared(
        entries=entries,
        entries_tail=entries_tail,
        q=gl.allocate_shared_memory(DTYPE, [LAYOUT.dims // SUM_DIMS, TILE_HEADS, SUM_DIMS], ROW),
        dout=gl.allocate_shared_memory(DTYPE, [C.SUM_PIECES, TILE_HEADS, SUM_DIMS], ROW),
        p=gl.allocate_shared_memory(DTYPE, [TILE_HEADS, TILE_KEYS], columns_of(TILE_KEYS)),
        ds=gl.allocate_shared_memory(DTYPE, [TILE_HEADS, TILE_KEYS], columns_of(TILE_KEYS)),
        slot=gl.allocate_shared_memory(gl.int32, [TARGETS, TILE_KEYS], WORD),
        even=gl.allocate_shared_memory(gl.int32, [TARGETS, TILE_KEYS], WORD),
        odd=gl.allocate_shared_memory(gl.int32, [TARGETS, TILE_KEYS], WORD),
        q_full=mbarrier.allocate_mbarrier(),
        empty=mbarrier.allocate_mbarrier(),
        p_full=mbarrier.allocate_mbarrier(),
        p_empty=mbarrier.allocate_mbarrier(),
    )
    mbarrier.init(shared.q_full, count=2)
    mbarrier.init(shared.empty, count=2)
    mbarrier.init(shared.p_full, count=1)
    mbarrier.init(shared.p_empty, count=2)
    gl.warp_specialize(
        [
            (differentiate, (tiles, shared, gl.constexpr(1), task, C)),
            (differentiate, (tiles, shared, gl.constexpr(0), task, C)),
            (score, (tiles, shared, task, C)),
        ],
        [4, 4],
        [DIFFERENTIATE_REGISTERS, SCORE_REGISTERS],
    )
