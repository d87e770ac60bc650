"""What attention kernels in Gluon share: Hopper's tiles, the keys and the task of a CTA, addresses, the epilogue."""

from typing import Any, NamedTuple

from xmla.core.formats import mla
from xmla.core.lang.gluon import gl, gluon
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.lang.offsets import gluon_offset_of as offset_of

TILE_KEYS = gl.constexpr(64)  # keys of a tile, in all three kernels
TILE_HEADS = gl.constexpr(64)  # heads per CTA: the rows of a wgmma; few_heads.py has fewer
STAGES = gl.constexpr(2)  # tiles of entries in shared memory
VALUE_DIMS = gl.constexpr(mla.VALUE_DIMS)
ROPE_DIMS = gl.constexpr(64)
HALVES = gl.constexpr(2)  # of the columns of P·V, for two consumer warpgroups
HALF_DIMS = gl.constexpr(VALUE_DIMS.value // HALVES.value)

# Registers of a warpgroup: S [TILE_HEADS, TILE_KEYS], and half of the output [TILE_HEADS, HALF_DIMS].
S_LAYOUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_KEYS.value, 16])
)
O_LAYOUT = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_DIMS.value, 16])
)


class Source(NamedTuple):
    """A token's slots first … end − 1, in tiles of TILE_KEYS, and the cache whose entries they index."""

    cache: Any  # [P, R, ROW], u8 if packed
    slots: Any  # [K] i32
    num_slots: Any
    first: Any
    end: Any


class Rotation(NamedTuple):
    """The token's row of the inverse rope: cosines, then sines. Not read if not `known`: the result is not rotated."""

    cos_sin: Any
    known: Any


class Task(NamedTuple):
    """What a CTA computes: a block of heads of a token."""

    q_row: Any  # [HEADS, L+E]
    sink: Any  # [HEADS] f32 if EPILOGUE.HAS_SINK
    rotation: Any  # Rotation or None
    out_row: Any  # [HEADS, VALUE_DIMS]; if SPLIT f16, over powers of two
    lse_row: Any  # [HEADS] f32; if SPLIT [1 + groups of dims, HEADS], with the powers after the lse
    head_block: Any


@gluon.jit
def pool(cache_ptr, LAYOUT: gl.constexpr):
    """A pointer to the cache: of bytes if entries are packed."""
    return cache_ptr.to(gl.pointer_type(gl.uint8), bitcast=True) if LAYOUT.packed else cache_ptr


@gluon.jit
def end_of_row(lengths_ptr, token, num_keys, HAS_LENGTHS: gl.constexpr):
    """The end of a token's keys in one source; a length may be the least integer."""
    end = num_keys
    if HAS_LENGTHS:
        end = gl.minimum(gl.load(lengths_ptr + token), num_keys)
    return end


@gluon.jit
def tiles_of(source, TILE: gl.constexpr):
    """Tiles of the keys of a source, whose end may lie before the first."""
    return gl.cdiv(gl.maximum(source.end, source.first) - source.first, TILE)


@gluon.jit
def rotation_of(cos_sin_ptr, positions_ptr, num_positions, token, C: gl.constexpr):
    """The rotation of a token's results; None if there is none, or the combination of splits does it."""
    if C.EPILOGUE.ROPE and not C.SPLIT:
        position = gl.load(positions_ptr + token)
        known = (position >= 0) & (position < num_positions)
        return Rotation(cos_sin_ptr + offset_of(position, C.EPILOGUE.COS_SIN_STRIDE), known)
    else:
        return None


@gluon.jit
def work_of_cta(
    q_ptr, cache_ptr, slots_ptr, lengths_ptr, sink_ptr, extra_cache_ptr, extra_slots_ptr, extra_lengths_ptr,
    cos_sin_ptr, positions_ptr, num_slots, num_keys, slot_stride, num_extra_slots, num_extra_keys, extra_slot_stride,
    num_positions, num_splits, split_keys, out_ptr, lse_ptr, TILE: gl.constexpr, POWERS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """A CTA's keys in both sources, how many tiles of TILE the first one and both have, and its task.

    The other parameters are the kernel's. A split has `split_keys`, of the first source's rounded up to whole tiles,
    then of the second's. POWERS: groups of dims over a power of two each, if keys are split.
    """
    # Head blocks of one split are neighbours: they read the same entries.
    HEAD_BLOCKS: gl.constexpr = (C.HEADS + C.BLOCK_H - 1) // C.BLOCK_H
    pid = gl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    split = pid // HEAD_BLOCKS % num_splits
    token = (pid // HEAD_BLOCKS // num_splits).to(gl.int64)
    first = split * split_keys
    end = end_of_row(lengths_ptr, token, num_keys, C.SOURCE.HAS_LENGTHS)
    end = gl.minimum(end, first + split_keys)
    main = Source(pool(cache_ptr, C.LAYOUT), slots_ptr + offset_of(token, slot_stride), num_slots, first, end)
    main_tiles = tiles_of(main, TILE)
    tiles = main_tiles
    if C.EXTRA is not None:
        gl.static_assert(C.EXTRA.LAYOUT == C.LAYOUT, "both sources have entries of one layout")
        extra_first = first - gl.cdiv(num_keys, TILE) * TILE
        extra_end = end_of_row(extra_lengths_ptr, token, num_extra_keys, C.EXTRA.HAS_LENGTHS)
        extra_end = gl.minimum(extra_end, extra_first + split_keys)
        extra_first = gl.maximum(extra_first, 0)
        extra_slots = extra_slots_ptr + offset_of(token, extra_slot_stride)
        extra = Source(pool(extra_cache_ptr, C.LAYOUT), extra_slots, num_extra_slots, extra_first, extra_end)
        tiles = main_tiles + tiles_of(extra, TILE)
    else:
        extra: gl.constexpr = None

    place = offset_of(token, C.HEADS)
    lse_place = place
    if C.SPLIT:
        place = offset_of(offset_of(token, num_splits) + split, C.HEADS)
        lse_place = offset_of(place, 1 + POWERS)
    rotation = rotation_of(cos_sin_ptr, positions_ptr, num_positions, token, C)
    q_row = q_ptr + offset_of(token, C.Q_STRIDE_T)
    out_row = out_ptr + offset_of(place, VALUE_DIMS)
    return main, extra, main_tiles, tiles, Task(q_row, sink_ptr, rotation, out_row, lse_ptr + lse_place, head_block)


@gluon.jit
def load_slots(main, extra, main_tiles, tile, LAYOUT: gl.constexpr, TILE: gl.constexpr = TILE_KEYS):
    """Slots [TILE] of a tile's entries, −1 past the end."""
    slots, start, end = main.slots, main.first + tile * TILE, main.end
    if extra is not None:
        is_extra = tile >= main_tiles
        slots = gl.where(is_extra, extra.slots, slots)
        start = gl.where(is_extra, extra.first + (tile - main_tiles) * TILE, start)
        end = gl.where(is_extra, extra.end, end)
    offs = start + gl.arange(0, TILE, layout=LAYOUT)
    return gl.load(slots + offs, mask=offs < end, other=-1)


@gluon.jit
def offsets(slot, LAYOUT: gl.constexpr, PAGE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Offsets of entries and of their scales in the cache."""
    page = offset_of(slot // PAGE_SIZE, PAGE_STRIDE)
    offset = slot % PAGE_SIZE
    data = page + offset_of(offset, LAYOUT.data, PAGE_SIZE)
    if LAYOUT.footer:
        # 32 bits only if the footer's start plus this offset fits them, which a whole page then does too.
        WHOLE: gl.constexpr = PAGE_SIZE * LAYOUT.row // LAYOUT.footer
        return data, page + (PAGE_SIZE * LAYOUT.data + offset_of(offset, LAYOUT.footer, WHOLE))
    else:
        return data, data + LAYOUT.scale_offset


@gluon.jit
def entry_pointers(main, extra, main_tiles, tile, slot, C: gl.constexpr):
    """Pointers [TILE_KEYS] to a tile's entries and to their scales, and which slots are valid."""
    cache, num_slots = main.cache, main.num_slots
    data, scales = offsets(slot, C.LAYOUT, C.SOURCE.PAGE_STRIDE, C.SOURCE.PAGE_SIZE)
    if extra is not None:
        is_extra = tile >= main_tiles
        cache = gl.where(is_extra, extra.cache, cache)
        num_slots = gl.where(is_extra, extra.num_slots, num_slots)
        extra_data, extra_scales = offsets(slot, C.LAYOUT, C.EXTRA.PAGE_STRIDE, C.EXTRA.PAGE_SIZE)
        data, scales = gl.where(is_extra, extra_data, data), gl.where(is_extra, extra_scales, scales)
    return cache + data, cache + scales, (slot >= 0) & (slot < num_slots)


@gluon.jit
def hidden_zero(tile):
    """0 in every iteration, which the compiler cannot prove; index shared memory with it against code motion.

    The descriptors of a wgmma operand that stays in place are loop-invariant. Loop-invariant code motion keeps them in
    registers of every thread, up to 72 of which spill. Computed inside the loop they take uniform registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [tile], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scaled(sums, factor):
    """Each row of `sums` times its factor."""
    return sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout), assert_trivial=True), 1)


@gluon.jit
def sum_in_threads(x):
    """Sums over the keys that a thread holds: [TILE_HEADS, TILE_KEYS] → [TILE_HEADS, 4]."""
    return gl.sum(gl.sum(gl.reshape(x, (TILE_HEADS, TILE_KEYS // 8, 4, 2)), 3), 1)


@gluon.jit
def close_sums(maximum, denominator, seen, rows, task, C: gl.constexpr):
    """The factor of P·V, −1 for a head without keys, and the lse. `seen` > 0: there is a valid key.

    The denominator is 0 where all scores are −inf; without a valid key it may be NaN, that of the query.
    """
    EPILOGUE: gl.constexpr = C.EPILOGUE
    head_ok = rows < C.HEADS
    has_keys = (seen > 0) & (denominator != 0.0) & head_ok
    if C.SPLIT:
        inverse = gl.where(has_keys, 1.0 / denominator, -1.0)
        lse = gl.where(has_keys, maximum + gl.log2(denominator), float("-inf"))
    else:
        base = gl.where(has_keys, maximum, 0.0)
        total = denominator
        if EPILOGUE.HAS_SINK:
            sink = gl.load(task.sink + rows, mask=head_ok, other=0.0) * LOG2E
            total += gl.exp2(sink - base)
        inverse = gl.where(has_keys, 1.0 / total, -1.0)
        lse = gl.where(has_keys, (base + gl.log2(denominator)) * EPILOGUE.LSE_UNIT, EPILOGUE.EMPTY_LSE)
        if EPILOGUE.HAS_SINK and EPILOGUE.LSE_SINK:
            lse = gl.where(has_keys, base + gl.log2(denominator), float("-inf"))
            top = gl.maximum(lse, sink)
            top = gl.where(gl.abs(top) == float("inf"), 0.0, top)
            lse = top + gl.log2(gl.exp2(lse - top) + gl.exp2(sink - top))
            lse = gl.where(lse == float("-inf"), EPILOGUE.EMPTY_LSE, lse * EPILOGUE.LSE_UNIT)
    return inverse, lse


@gluon.jit
def rotate_back(out, rotation, ROPE: gl.constexpr):
    """The inverse rope on the last ROPE columns of out [TILE_HEADS, HALF_DIMS], which rotates adjacent pairs."""
    even, odd = gl.split(gl.reshape(out, (TILE_HEADS, HALF_DIMS // ROPE, ROPE // 2, 2)))
    PAIRS: gl.constexpr = even.type.layout
    offs = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, PAIRS)))
    mask = offs < gl.where(rotation.known, ROPE // 2, 0)
    cos = gl.load(rotation.cos_sin + offs, mask=mask, other=1.0).to(gl.float32)
    sin = gl.load(rotation.cos_sin + ROPE // 2 + offs, mask=mask, other=0.0).to(gl.float32)
    cos = gl.expand_dims(gl.expand_dims(cos, 0), 0)
    sin = gl.expand_dims(gl.expand_dims(sin, 0), 0)
    GROUPS: gl.constexpr = HALF_DIMS // ROPE
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    roped = gl.expand_dims(gl.expand_dims(group, 0), 2) == GROUPS - 1
    turned_even = gl.where(roped, even * cos + odd * sin, even)
    turned_odd = gl.where(roped, odd * cos - even * sin, odd)
    return gl.convert_layout(
        gl.reshape(gl.join(turned_even, turned_odd), (TILE_HEADS, HALF_DIMS)), out.type.layout, assert_trivial=True
    )


@gluon.jit
def exponent_for_half(x, AXIS: gl.constexpr):
    """e with max |x| over AXIS, NaN apart, in 2**(e + 14) … 2**(e + 15): float16 holds x / 2**e.

    It is normal there down to 2**-28 of the largest.
    """
    return gl.maximum((gl.max(gl.abs(x), AXIS).to(gl.int32, bitcast=True) >> 23) - 127 - 14, -126)


@gluon.jit
def store_half(out, share, smem, PART: gl.constexpr, task, C: gl.constexpr):
    """Store the left (0) or right (1) half of the output's columns, [TILE_HEADS, HALF_DIMS].

    Results pass through `smem`, which is free by then, so that stores fill whole sectors.
    """
    share = gl.expand_dims(share, 1)
    out = out * share
    if PART == 1 and task.rotation is not None:
        out = rotate_back(out, task.rotation, C.EPILOGUE.ROPE)
    if C.SPLIT:
        exponent = exponent_for_half(out, 1)
        rows = task.head_block * TILE_HEADS + gl.arange(0, TILE_HEADS, layout=exponent.type.layout)
        gl.store(task.lse_row + (1 + PART) * C.HEADS + rows, power_of_two(exponent), mask=rows < C.HEADS)
        out = out * gl.expand_dims(power_of_two(-exponent), 1)
    result = gl.where(share < 0.0, 0.0, out).to(task.out_row.dtype.element_ty)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    staged = smem.reinterpret(result.dtype, [TILE_HEADS, HALF_DIMS], smem.layout)
    staged.store(result)
    gl.barrier()
    result = staged.load(ROWS)
    offs_h = task.head_block * TILE_HEADS + gl.arange(0, TILE_HEADS, layout=gl.SliceLayout(1, result.type.layout))
    offs_l = PART * HALF_DIMS + gl.arange(0, HALF_DIMS, layout=gl.SliceLayout(0, result.type.layout))
    out_ptrs = task.out_row + gl.expand_dims(offset_of(offs_h, VALUE_DIMS, C.HEADS), 1) + gl.expand_dims(offs_l, 0)
    gl.store(out_ptrs, result, mask=gl.expand_dims(offs_h < C.HEADS, 1))
