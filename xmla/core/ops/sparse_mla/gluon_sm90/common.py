"""What the attention kernels for Hopper share: where entries are, and how sums of values become results."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from xmla.core.gluon import gl, gluon
from xmla.core.lang import LOG2E
from xmla.core.offsets import gluon_offset_of as offset_of

# Of S [64 heads, 64 keys] and of half of the sums [64 heads, 256] in the registers of a warpgroup.
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))


class Source(NamedTuple):
    """Keys first … end − 1 of a token's slots in tiles of 64, and the cache that they name entries of."""

    cache: Any  # [P, R, ROW], u8 if packed
    slots: Any  # [K] i32
    num_slots: Any
    first: Any
    end: Any


class Turn(NamedTuple):
    """By which roped dims of the result are turned back: half a row of cosines, then of sines; none if not `known`."""

    cos_sin: Any
    known: Any


class Task(NamedTuple):
    """What a program computes: a block of heads of a token."""

    q_row: Any  # [HEADS, L+E]
    sink: Any  # [HEADS] f32 if HAS_SINK
    turn: Any  # Turn or None
    out_row: Any  # [HEADS, 512]
    lse_row: Any  # [HEADS] f32
    head_block: Any


@dataclass(frozen=True)
class Constants:
    """The kernel's parameters of these names that all of its parts need."""

    LAYOUT: Any
    PAGE_STRIDE: int
    PAGE_SIZE: int
    EXTRA_PAGE_STRIDE: int
    EXTRA_PAGE_SIZE: int
    HEADS: int
    Q_STRIDE_H: int
    SCALE: float
    HAS_SINK: bool
    EMPTY_LSE: float
    LSE_UNIT: float
    LSE_SINK: bool
    SPLIT: bool


@gluon.jit
def load_slots(main, extra, main_tiles, tile, LAYOUT: gl.constexpr):
    """The slots of a tile's 64 entries, −1 past the end."""
    slots, start, end = main.slots, main.first + tile * 64, main.end
    if extra is not None:
        is_extra = tile >= main_tiles
        slots = gl.where(is_extra, extra.slots, slots)
        start = gl.where(is_extra, extra.first + (tile - main_tiles) * 64, start)
        end = gl.where(is_extra, extra.end, end)
    offs = start + gl.arange(0, 64, layout=LAYOUT)
    return gl.load(slots + offs, mask=offs < end, other=-1)


@gluon.jit
def offsets(slot, LAYOUT: gl.constexpr, PAGE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Where entries begin in their cache, and where their scales do."""
    page = offset_of(slot // PAGE_SIZE, PAGE_STRIDE)
    offset = slot % PAGE_SIZE
    data = page + offset_of(offset, LAYOUT.data, PAGE_SIZE)
    if LAYOUT.footer:
        # In 32 bits only where the sum with the footer's start fits them: where a whole page does.
        WHOLE: gl.constexpr = PAGE_SIZE * LAYOUT.row // LAYOUT.footer
        return data, page + (PAGE_SIZE * LAYOUT.data + offset_of(offset, LAYOUT.footer, WHOLE))
    else:
        return data, data + LAYOUT.scale_offset


@gluon.jit
def entry_pointers(main, extra, main_tiles, tile, slot, C: gl.constexpr):
    """Where each of a tile's 64 entries starts, where its scales do, and which entries are valid."""
    cache, num_slots = main.cache, main.num_slots
    data, scales = offsets(slot, C.LAYOUT, C.PAGE_STRIDE, C.PAGE_SIZE)
    if extra is not None:
        is_extra = tile >= main_tiles
        cache = gl.where(is_extra, extra.cache, cache)
        num_slots = gl.where(is_extra, extra.num_slots, num_slots)
        extra_data, extra_scales = offsets(slot, C.LAYOUT, C.EXTRA_PAGE_STRIDE, C.EXTRA_PAGE_SIZE)
        data, scales = gl.where(is_extra, extra_data, data), gl.where(is_extra, extra_scales, scales)
    return cache + data, cache + scales, (slot >= 0) & (slot < num_slots)


@gluon.jit
def exponent_of(x):
    """The largest integer e with 2**e ≤ |x|, from the bits of float32 `x`, within ±100."""
    bits = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return gl.minimum(gl.maximum((bits >> 23) - 127, -100), 100)


@gluon.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def hidden_zero(tile):
    """0 that the compiler does not know to be the same for every `tile`, to index shared memory with.

    Descriptors of an operand that stays in place are loop-invariant, but the compiler keeps each in registers of every
    thread, where up to 72 of them spill; computed in the loop they take uniform registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [tile], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def small_float(x):
    """float32 of an integer within ±2**21, by arithmetic: results of the conversion unit wait for loads in flight."""
    return (x + 0x4B400000).to(gl.float32, bitcast=True) - 12582912.0


@gluon.jit
def finite_abs(x):
    return gl.where(x == x, gl.abs(x), 0.0)


@gluon.jit
def scaled(sums, factor):
    """Each row of `sums` times its factor."""
    return sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout), assert_trivial=True), 1)


@gluon.jit
def sum_in_threads(x):
    """Sums over the keys that a thread holds: [64, 64] → [64, 4]."""
    return gl.sum(gl.sum(gl.reshape(x, (64, 8, 4, 2)), 3), 1)


@gluon.jit
def close_sums(maximum, denominator, seen, rows, task, C: gl.constexpr):
    """What sums of values are multiplied by, −1 where a head has no key, and the lse; `seen` > 0 if there is a key."""
    head_ok = rows < C.HEADS
    has_keys = (seen > 0) & head_ok
    if C.SPLIT:
        inverse = gl.where(has_keys, 1.0 / denominator, -1.0)
        lse = gl.where(has_keys, maximum + gl.log2(denominator), float("-inf"))
    else:
        base = gl.where(has_keys, maximum, 0.0)
        total = denominator
        if C.HAS_SINK:
            sink = gl.load(task.sink + rows, mask=head_ok, other=0.0) * LOG2E
            total += gl.exp2(sink - base)
        inverse = gl.where(has_keys, 1.0 / total, -1.0)
        lse = gl.where(has_keys, (base + gl.log2(denominator)) * C.LSE_UNIT, C.EMPTY_LSE)
        if C.HAS_SINK and C.LSE_SINK:
            lse = gl.where(has_keys, base + gl.log2(denominator), float("-inf"))
            top = gl.maximum(lse, sink)
            top = gl.where(gl.abs(top) == float("inf"), 0.0, top)
            lse = top + gl.log2(gl.exp2(lse - top) + gl.exp2(sink - top))
            lse = gl.where(lse == float("-inf"), C.EMPTY_LSE, lse * C.LSE_UNIT)
    return inverse, lse


@gluon.jit
def turn_back(out, turn):
    """The last 64 of the columns of out [64, 256], as pairs of neighbours, turned back by the token's position."""
    even, odd = gl.split(gl.reshape(out, (64, 4, 32, 2)))
    PAIRS: gl.constexpr = even.type.layout
    offs = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(0, PAIRS)))
    mask = offs < gl.where(turn.known, 32, 0)
    cos = gl.load(turn.cos_sin + offs, mask=mask, other=1.0).to(gl.float32)
    sin = gl.load(turn.cos_sin + 32 + offs, mask=mask, other=0.0).to(gl.float32)
    cos = gl.expand_dims(gl.expand_dims(cos, 0), 0)
    sin = gl.expand_dims(gl.expand_dims(sin, 0), 0)
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    roped = gl.expand_dims(gl.expand_dims(group, 0), 2) == 3
    turned_even = gl.where(roped, even * cos + odd * sin, even)
    turned_odd = gl.where(roped, odd * cos - even * sin, odd)
    return gl.convert_layout(
        gl.reshape(gl.join(turned_even, turned_odd), (64, 256)), out.type.layout, assert_trivial=True
    )


@gluon.jit
def store_half(out, share, smem, PART: gl.constexpr, task, C: gl.constexpr):
    """Half of the output's columns; the narrow type through `smem`, which nobody needs any more, to whole sectors."""
    share = gl.expand_dims(share, 1)
    out = out * share
    if PART == 1 and task.turn is not None:
        out = turn_back(out, task.turn)
    result = gl.where(share < 0.0, 0.0, out).to(task.out_row.dtype.element_ty)
    if not C.SPLIT:
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        staged = smem.reinterpret(result.dtype, [64, 256], smem.layout)
        staged.store(result)
        gl.barrier()
        result = staged.load(ROWS)
    offs_h = task.head_block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, result.type.layout))
    offs_l = PART * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, result.type.layout))
    out_ptrs = task.out_row + gl.expand_dims(offset_of(offs_h, 512, C.HEADS), 1) + gl.expand_dims(offs_l, 0)
    gl.store(out_ptrs, result, mask=gl.expand_dims(offs_h < C.HEADS, 1))
