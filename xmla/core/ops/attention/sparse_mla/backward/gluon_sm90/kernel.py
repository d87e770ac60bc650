"""The derivative of attention over plain rows on Hopper, in Gluon.

A CTA has a block of heads of a token and all its keys, a tile at a time, on four warpgroups:
- `gather` copies a tile's entries into one of two stages, and finds where and in what unit gradients are added.
- `score` computes S = q·Kᵀ and dP = dout·Vᵀ of a tile, and so P and dS, which it hands over in one of two stages. It
  has the roped dims, too: of dq += dS·K, and of entries' gradients qᵀ·dS, which it adds to their sums.
- Two, `differentiate`, have half of the other dims each: of dq += dS·K, and of entries' gradients qᵀ·dS + doutᵀ·P, a
  piece of dims at a time.

An arrow goes from who arrives at a barrier to who waits for it:

              gather                            score                       differentiate, twice
    tile t    entries, unit, place → full ────► S, dP → P, dS → p_full ───► dq += dS·K
                                 └────────────────────────────────────────► qᵀ·dS + doutᵀ·P of the first piece, added
              entries of t + 2 ◄─────────────── roped dims → empty          → empty
                                                                            the other pieces, each added
                                                P, dS of t + 2 ◄─────────── → p_empty, before the last is added

What is added in the L2 cache limits the speed, by requests as well as by bytes. A wgmma whose rows are dims leaves 8
dims, and those 8 further, of 4 entries to a warp. Those pairs are neighbours in the sums, and are added as one integer:
4 requests of 64 bytes. Whatever else the additions' queue serves waits behind them, so that nothing spills between them
and the next product, and what is loaded is loaded a tile ahead. The loop over pieces is not unrolled: code that exceeds
the instruction cache takes half as long again. See benchmarks/log/training.md.
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
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.lang.sums import SUMMAND_BITS
from xmla.core.lang.sums import gluon_exponent_within as exponent_within
from xmla.core.lang.sums import gluon_low_bits as low_bits
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.common import (
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
from xmla.core.ops.attention.sparse_mla.backward.kernels import MOST_PROBABLE, NOT_A_NUMBER, WORDS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import TILE_HEADS, offsets
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import copy_columns

TILE_KEYS = gl.constexpr(32)
STAGES = gl.constexpr(2)  # of entries, and of P and dS
TARGETS = gl.constexpr(4)  # tiles of which it is known where to add: those are read for longer than entries
HALF_PIECES = gl.constexpr(VALUE_PIECES.value // 2)

S_LAYOUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_KEYS.value, 16])
)
PIECE_LAYOUT = S_LAYOUT  # of an entry's dims against keys
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a tile's keys, in each warp
VALID = gl.constexpr(1 << 9)  # in the unit of an entry: its slot is valid
ADDED = gl.constexpr(8)  # elements of a thread that are added by one piece of PTX
OPERANDS = gl.constexpr(",".join(["=&r"] * (ADDED.value // 4) + [kind for kind in "lrfrr" for _ in range(ADDED.value)]))


class Shared(NamedTuple):
    """Shared memory and its mbarriers; of those `full` and so on, one per stage."""

    entries: Any  # [stage · pieces + piece, TILE_KEYS, PIECE_DIMS]
    q: Any  # [piece, TILE_HEADS, PIECE_DIMS]
    dout: Any  # [piece, TILE_HEADS, PIECE_DIMS]
    p: Any  # [stage, TILE_HEADS, TILE_KEYS]
    ds: Any  # [stage, TILE_HEADS, TILE_KEYS]
    unit: Any  # [tile % TARGETS, TILE_KEYS] i32: what summands are multiplied by, as float32 | VALID | `low_bits`
    place: Any  # [tile % TARGETS, TILE_KEYS] i32: the entry to which they are added
    q_full: Any
    full: Any
    empty: Any
    p_full: Any
    p_empty: Any


@gluon.jit
def load_slots(task, tile, LAYOUT: gl.constexpr):
    """Slots [TILE_KEYS] of a tile's entries, −1 past the end."""
    offs = tile * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=LAYOUT)
    return gl.load(task.slots + offs, mask=offs < task.end, other=-1)


@gluon.jit
def load_summands(task, slot):
    """The bound of each entry's summands, and how many there are."""
    ok = slot >= 0
    return gl.load(task.bounds + slot, mask=ok, other=0), gl.load(task.references + slot, mask=ok, other=1)


@gluon.jit
def gather(tiles, shared, task, C: gl.constexpr):
    """Copy each tile's entries, and say where and in what unit their gradients are added."""
    PIECES: gl.constexpr = C.PIECES
    ROWS: gl.constexpr = gl.SliceLayout(1, rows_of(PIECE_DIMS))
    slot = load_slots(task, 0, ROWS)
    next_slot = load_slots(task, 1, ROWS)
    bound, references = load_summands(task, slot)
    for tile in range(0, tiles):
        stage = tile % STAGES
        later_slot = load_slots(task, tile + 2, ROWS)
        next_bound, next_references = load_summands(task, next_slot)
        ok = slot >= 0
        data, _ = offsets(slot, C.LAYOUT, C.SOURCE.PAGE_STRIDE, C.SOURCE.PAGE_SIZE)
        mbarrier.wait(shared.empty.index(stage), (tile // STAGES & 1) ^ 1)
        for piece in gl.static_range(PIECES):
            copy_columns(task.cache + data, ok, shared.entries.index(stage * PIECES + piece), piece * PIECE_DIMS)
        async_copy.mbarrier_arrive(shared.full.index(stage), increment_count=False)
        # Another CTA may have stored NOT_A_NUMBER as references; then what is added does not matter.
        unit = power_of_two(exponent_within(bound, SUMMAND_BITS)).to(gl.int32, bitcast=True)
        shared.unit.index(tile % TARGETS).store(gl.where(ok, unit | VALID, 0) | low_bits(references * C.HEAD_BLOCKS))
        # 0 is added past the last slot, to rows of entries that differ, for the sake of speed.
        key = tile * TILE_KEYS + gl.arange(0, TILE_KEYS, layout=ROWS)
        shared.place.index(tile % TARGETS).store(gl.where(ok, slot, key % task.num_slots))
        mbarrier.arrive(shared.full.index(stage), count=1)
        slot, next_slot, bound, references = next_slot, later_slot, next_bound, next_references
    async_copy.wait_group(0)


@gluon.constexpr_function
def additions(dims):
    """PTX that adds a thread's elements of a piece to sums of so many dims, in parts as by `lang.sums.parts_of`.

    Element i has key i % 2 + i // 4 · 8 and dim i // 2 % 2 · 8 from the thread's first. Operands: an unused result,
    pointers to the low words of the thread's two dims, of the first entry, the first dim, x, and of each key its unit
    and place. x is added to the low words as a whole, the second dim's times 2**32; where it has a high part, which is
    seldom, that is moved to the high words. It does not matter that low words overflow between. Gluon's own additions
    branch at each element and keep all addresses in registers.
    """
    count = ADDED.value
    skipped = count // 4
    (low, dim, x, unit, place) = (lambda i, operand=o: f"${skipped + operand * count + i}" for o in range(5))
    row = 4 * WORDS.value * dims  # bytes
    lines = [".reg .pred more;", f".reg .b32 t<2>, s, bits, x<{count}>;", ".reg .f32 z<2>, u, limit;"]
    lines += [".reg .b64 wide<2>, sum, both;", "setp.ne.b32 more, 0, 0;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(skipped)]
    for i in (j for j in range(count) if j % 4 < 2):
        lines += [f"mad.wide.s32 sum, {place(i)}, {row}, {low(0)};", f"and.b32 s, {unit(i)}, 0xff800000;"]
        lines += ["mov.b32 u, s;"]
        for half in range(2):
            lines += [f"fma.rn.f32 z{half}, {x(i + 2 * half)}, u, 0f3F000000;"]
            lines += [f"cvt.rmi.s32.f32 x{i + 2 * half}, z{half};"]
        lines += [f"shr.s32 s, x{i}, 31;", f"add.s32 s, s, x{i + 2};", f"mov.b64 both, {{x{i}, s}};"]
        lines += ["red.relaxed.gpu.global.add.u64 [sum], both;"]
        # High parts are 0 if |z| < 2**(bits − 1).
        lines += ["abs.f32 z0, z0;", "abs.f32 z1, z1;", "max.f32 z0, z0, z1;", f"shl.b32 s, {unit(i)}, 23;"]
        lines += ["add.s32 s, s, 0x3f000000;", "mov.b32 limit, s;", "setp.ge.or.f32 more, z0, limit, more;"]
    lines += ["@!more bra done;"]
    for i in (j for j in range(count) if j % 4 < 2):
        lines += [f"and.b32 bits, {unit(i)}, 63;", "add.s32 s, bits, -1;", "shl.b32 s, 1, s;"]
        for half in range(2):
            lines += [f"add.s32 t{half}, s, x{i + 2 * half};", f"shr.s32 t{half}, t{half}, bits;"]
            lines += [f"cvt.s64.s32 wide{half}, t{half};", f"shl.b32 t{half}, t{half}, bits;"]
            lines += [f"neg.s32 t{half}, t{half};"]
        lines += ["or.b32 s, t0, t1;", "setp.ne.s32 more, s, 0;", "shr.s32 s, t0, 31;", "add.s32 s, s, t1;"]
        lines += ["mov.b64 both, {t0, s};", f"mad.wide.s32 sum, {place(i)}, {row}, {low(0)};"]
        lines += ["@more red.relaxed.gpu.global.add.u64 [sum], both;"]
        # From the thread's low words to its first dim's high words.
        lines += [f"and.b32 s, {dim(0)}, -16;", "mad.wide.u32 sum, s, 4, sum;"]
        for half in range(2):
            lines += [f"@more red.relaxed.gpu.global.add.u64 [sum + {4 * dims + 64 * half}], wide{half};"]
    return "\n".join(["{", *lines, "done:", "}"])


@gluon.jit
def add_piece(acc, piece, unit, place, task, C: gl.constexpr):
    """Add a piece of dims to the sums of a tile's entries, PAIRED as `backward.kernels.load_sums` describes."""
    offs_d = gl.arange(0, PIECE_DIMS, layout=gl.SliceLayout(1, PIECE_LAYOUT))
    dim = piece * PIECE_DIMS + offs_d // 16 * 16 + offs_d % 8
    low = gl.expand_dims((task.sums + dim + offs_d % 8).to(gl.uint64, bitcast=True), 1)
    gl.inline_asm_elementwise(
        additions(C.LAYOUT.dims),
        OPERANDS,
        [low, gl.expand_dims(dim, 1), acc, gl.expand_dims(unit, 0), gl.expand_dims(place, 0)],
        dtype=gl.int8,
        is_pure=False,
        pack=ADDED,
    )


@gluon.jit
def wait_for_queries(shared, tiles):
    """Wait until nobody reads q in shared memory any more: dq goes through it, so that stores are of whole rows."""
    uses = (tiles + STAGES - 1) // STAGES  # of the last tile's stage
    mbarrier.wait(shared.p_empty.index((tiles + STAGES - 1) % STAGES), (uses & 1) ^ 1)


@gluon.jit
def store_dq(dq, piece, shared, task, C: gl.constexpr):
    """Store a piece of dq."""
    store_dims(dq, shared.q.index(piece), piece * PIECE_DIMS, task, C)


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def mark(wrong, tile, shared, task):
    """Mark entries of a tile, one of each bit that is set, whose gradients are NaN."""
    key = gl.arange(0, TILE_KEYS, layout=LINE)
    unit, place = shared.unit.index(tile % TARGETS).load(LINE), shared.place.index(tile % TARGETS).load(LINE)
    ok = (unit & VALID) != 0
    of_key = ((wrong >> key) & 1) != 0
    gl.store(task.references + place, gl.full([TILE_KEYS], NOT_A_NUMBER, gl.int32, LINE), mask=ok & of_key)
    shared.unit.index(tile % TARGETS).store(gl.where(of_key, unit & (VALID - 1), unit))  # times 0, 0 is added


@gluon.jit
def score(tiles, shared, task, C: gl.constexpr):
    """P and dS of each tile, and the roped dims of gradients."""
    DTYPE: gl.constexpr = task.q_row.dtype.element_ty
    PIECES: gl.constexpr = C.PIECES
    KEYS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    offs_h = task.first_head + gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, S_LAYOUT))
    total, delta, lse, dlse = load_rows(task, offs_h, C)
    empty = gl.zeros([TILE_HEADS, TILE_KEYS], gl.float32, S_LAYOUT)
    if C.LAYOUT.tail:
        dq = gl.zeros([TILE_HEADS, PIECE_DIMS], gl.float32, DQ_LAYOUT)
    mbarrier.wait(shared.q_full, 0)
    for tile in tl.range(0, tiles, disable_licm=True):
        stage = tile % STAGES
        phase = tile // STAGES & 1
        mbarrier.wait(shared.full.index(stage), phase)
        fence_async_shared()
        first = stage * PIECES
        s, dp = empty, empty
        for piece in gl.static_range(PIECES):
            keys = shared.entries.index(first + piece).permute((1, 0))
            s = warpgroup_mma(shared.q.index(piece), keys, s, use_acc=piece > 0, is_async=True)
            if piece < VALUE_PIECES:
                dp = warpgroup_mma(shared.dout.index(piece), keys, dp, use_acc=piece > 0, is_async=True)
        key_ok = (shared.unit.index(tile % TARGETS).load(KEYS) & VALID) != 0
        scores, dp = warpgroup_mma_wait(0, deps=[s, dp])
        p, ds, greatest = derive(scores, dp, total, delta, lse, dlse, C)
        ds = gl.where(greatest <= MOST_PROBABLE, ds * C.SCALE, float("nan"))
        bit = gl.expand_dims(1 << gl.arange(0, TILE_KEYS, layout=KEYS), 0)
        wrong = gl.where(gl.abs(ds) < float("inf"), 0, bit)
        wrong = gl.reduce(gl.reduce(wrong, 1, either), 0, either)
        if wrong != 0:
            mark(wrong, tile, shared, task)
        ds = gl.where(gl.expand_dims(key_ok, 0), ds, 0.0)
        mbarrier.wait(shared.p_empty.index(stage), phase ^ 1)
        shared.p.index(stage).store(p.to(DTYPE))
        shared.ds.index(stage).store(ds.to(DTYPE))
        fence_async_shared()
        mbarrier.arrive(shared.p_full.index(stage), count=1)
        if C.LAYOUT.tail:
            ds = shared.ds.index(stage)
            gradient = start_gradient(shared.q.index(VALUE_PIECES), ds, empty, False, C)
            dq = warpgroup_mma(ds, shared.entries.index(first + VALUE_PIECES), dq, is_async=True)
            unit = shared.unit.index(tile % TARGETS).load(KEYS)
            place = shared.place.index(tile % TARGETS).load(KEYS)
            gradient, dq = warpgroup_mma_wait(0, deps=[gradient, dq])
        mbarrier.arrive(shared.empty.index(stage), count=1)
        if C.LAYOUT.tail:
            mbarrier.arrive(shared.p_empty.index(stage), count=1)
            add_piece(gradient, VALUE_PIECES, unit, place, task, C)

    if C.LAYOUT.tail:
        wait_for_queries(shared, tiles)
        store_dq(dq, VALUE_PIECES, shared, task, C)


@gluon.jit
def start_gradient(rows, factors, acc, use_acc: gl.constexpr, C: gl.constexpr):
    """Start acc + rowsᵀ·factors [PIECE_DIMS, TILE_KEYS], sums over heads."""
    HEADS: gl.constexpr = C.SUMMED_HEADS
    rows, factors = rows.slice(0, HEADS, 0).permute((1, 0)), factors.slice(0, HEADS, 0)
    return warpgroup_mma(rows, factors, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def start_piece(shared, stage, empty, piece, C: gl.constexpr):
    """Start qᵀ·dS + doutᵀ·P of a piece of dims, [PIECE_DIMS, TILE_KEYS]."""
    acc = start_gradient(shared.q.index(piece), shared.ds.index(stage), empty, False, C)
    return start_gradient(shared.dout.index(piece), shared.p.index(stage), acc, True, C)


@gluon.jit
def differentiate(tiles, shared, PART: gl.constexpr, task, C: gl.constexpr):
    """The left (0) or right (1) half of the dims of gradients, without the roped ones."""
    PIECES: gl.constexpr = C.PIECES
    KEYS: gl.constexpr = gl.SliceLayout(0, PIECE_LAYOUT)
    FIRST: gl.constexpr = PART * HALF_PIECES
    LAST: gl.constexpr = FIRST + HALF_PIECES
    if PART == 0:
        copy_rows(task.q_row, task.first_head, shared.q, PIECES, C.Q_STRIDE_H, C)
    else:
        copy_rows(task.dout_row, task.first_head, shared.dout, VALUE_PIECES, C.DOUT_STRIDE_H, C)
    mbarrier.arrive(shared.q_full, count=1)
    mbarrier.wait(shared.q_full, 0)
    empty = gl.zeros([PIECE_DIMS, TILE_KEYS], gl.float32, PIECE_LAYOUT)
    zeros = gl.zeros([TILE_HEADS, PIECE_DIMS], gl.float32, DQ_LAYOUT)
    dq0, dq1, dq2, dq3 = zeros, zeros, zeros, zeros
    for tile in tl.range(0, tiles, disable_licm=True):
        stage = tile % STAGES
        phase = tile // STAGES & 1
        mbarrier.wait(shared.full.index(stage), phase)
        mbarrier.wait(shared.p_full.index(stage), phase)
        fence_async_shared()
        ds = shared.ds.index(stage)
        keys = stage * PIECES + FIRST
        acc = start_piece(shared, stage, empty, FIRST, C)
        dq0 = warpgroup_mma(ds, shared.entries.index(keys), dq0, is_async=True)
        dq1 = warpgroup_mma(ds, shared.entries.index(keys + 1), dq1, is_async=True)
        dq2 = warpgroup_mma(ds, shared.entries.index(keys + 2), dq2, is_async=True)
        dq3 = warpgroup_mma(ds, shared.entries.index(keys + 3), dq3, is_async=True)
        unit = shared.unit.index(tile % TARGETS).load(KEYS)
        place = shared.place.index(tile % TARGETS).load(KEYS)
        acc = warpgroup_mma_wait(4, deps=[acc])
        add_piece(acc, FIRST, unit, place, task, C)
        dq0, dq1, dq2, dq3 = warpgroup_mma_wait(0, deps=[dq0, dq1, dq2, dq3])
        mbarrier.arrive(shared.empty.index(stage), count=1)
        for piece in range(FIRST + 1, LAST):
            acc = start_piece(shared, stage, empty, piece, C)
            unit = shared.unit.index(tile % TARGETS).load(KEYS)
            place = shared.place.index(tile % TARGETS).load(KEYS)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(shared.p_empty.index(stage), count=1, pred=piece == LAST - 1)
            add_piece(acc, piece, unit, place, task, C)

    wait_for_queries(shared, tiles)
    store_dq(dq0, FIRST, shared, task, C)
    store_dq(dq1, FIRST + 1, shared, task, C)
    store_dq(dq2, FIRST + 2, shared, task, C)
    store_dq(dq3, FIRST + 3, shared, task, C)


@gluon.jit
def sparse_mla_backward_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32, as `order_slots_kernel` says
    dout_ptr,  # [T, H, LANES]
    ends_ptr,  # [T] i32
    lse_ptr,  # [T, H] f32 if OWN_LSE
    dlse_ptr,  # [T, H] f32 if OWN_LSE
    bounds_ptr,  # [P, R] i32
    total_ptr,  # [T, H] f32
    delta_ptr,  # [T, H] f32
    num_slots,
    num_keys,  # K
    first_token,
    references_ptr,  # [P, R] i32
    sums_ptr,  # [P, R, WORDS·ROW] i32
    dq_ptr,  # [T, H, L+E]
    C: gl.constexpr,  # HopperProducts
):
    task, tiles = start(
        q_ptr, cache_ptr, slots_ptr, dout_ptr, ends_ptr, lse_ptr, dlse_ptr, total_ptr, delta_ptr, num_slots,
        num_keys, first_token, sums_ptr, dq_ptr, bounds_ptr, references_ptr, TILE_KEYS, C,
    )  # fmt: skip
    LAYOUT: gl.constexpr = C.LAYOUT
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    PIECES: gl.constexpr = C.PIECES
    ROW: gl.constexpr = columns_of(PIECE_DIMS)
    TILE: gl.constexpr = columns_of(TILE_KEYS)
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = Shared(
        entries=gl.allocate_shared_memory(DTYPE, [STAGES * PIECES, TILE_KEYS, PIECE_DIMS], ROW),
        q=gl.allocate_shared_memory(DTYPE, [PIECES, TILE_HEADS, PIECE_DIMS], ROW),
        dout=gl.allocate_shared_memory(DTYPE, [VALUE_PIECES, TILE_HEADS, PIECE_DIMS], ROW),
        p=gl.allocate_shared_memory(DTYPE, [STAGES, TILE_HEADS, TILE_KEYS], TILE),
        ds=gl.allocate_shared_memory(DTYPE, [STAGES, TILE_HEADS, TILE_KEYS], TILE),
        unit=gl.allocate_shared_memory(gl.int32, [TARGETS, TILE_KEYS], WORD),
        place=gl.allocate_shared_memory(gl.int32, [TARGETS, TILE_KEYS], WORD),
        q_full=mbarrier.allocate_mbarrier(),
        full=mbarrier.allocate_mbarrier(batch=STAGES),
        empty=mbarrier.allocate_mbarrier(batch=STAGES),
        p_full=mbarrier.allocate_mbarrier(batch=STAGES),
        p_empty=mbarrier.allocate_mbarrier(batch=STAGES),
    )
    mbarrier.init(shared.q_full, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(shared.full.index(stage), count=128 + 1)
        mbarrier.init(shared.empty.index(stage), count=3)
        mbarrier.init(shared.p_full.index(stage), count=1)
        mbarrier.init(shared.p_empty.index(stage), count=2 + (LAYOUT.tail > 0))
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
