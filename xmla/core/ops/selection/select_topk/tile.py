"""A tile of a row in registers, and the elements of it that become candidates."""

import triton
import triton.language as tl

from xmla.core.ops.selection.select_topk.pairs import order_key, pack

COLUMNS_A_WARP = tl.constexpr(512)  # of a tile


@triton.jit
def lane_columns(WARPS: tl.constexpr):
    return tl.arange(0, WARPS)[:, None] * COLUMNS_A_WARP + 4 * tl.arange(0, 32)[None, :]


@triton.jit
def load_four(ptrs, offs, left, WHOLE: tl.constexpr, UNIT: tl.constexpr):
    """Elements at ptrs and the three after in float32, NaN from `left` on unless the tile is WHOLE."""
    four = ()
    if WHOLE and UNIT >= 4:
        x = tl.load(ptrs[:, :, None] + tl.arange(0, 4)[None, None, :]).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 32, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        four = (x0, x1, x2, x3)
    else:
        for i in tl.static_range(4):
            if WHOLE:
                four += (tl.load(ptrs + i).to(tl.float32),)
            else:
                four += (tl.load(ptrs + i, mask=offs + i < left, other=float("nan")).to(tl.float32),)
    return four


@triton.jit
def load_tile(ptr, last, WHOLE: tl.constexpr, WARPS: tl.constexpr, UNIT: tl.constexpr):
    """WARPS · 512 elements, NaN from `last` on unless the tile is WHOLE: four quarters, four adjacent columns per lane.

    16 tensors of a warp's width: in one tensor the scattered stores would need another layout than the loads. With a
    UNIT of 4 or more the four columns are one load, of 16 bytes if they are float32, if `ptr` is so aligned.
    """
    offs = lane_columns(WARPS)
    tile = ()
    for quarter in tl.static_range(4):
        tile += (load_four(ptr + (offs + 128 * quarter), offs + 128 * quarter, last, WHOLE, UNIT),)
    return tile


@triton.jit
def no_tile(WARPS: tl.constexpr):
    """What `load_tile` returns, of no row."""
    zero = tl.zeros([WARPS, 32], tl.float32)
    four = (zero, zero, zero, zero)
    return four, four, four, four


@triton.jit
def wanted(x, offs, first, last, key_above, value_from, WHOLE: tl.constexpr, BY_KEY: tl.constexpr):
    """Which of 4 adjacent elements are kept."""
    kept = ()
    for i in tl.static_range(4):
        if BY_KEY:
            kept += (order_key(x[i]) > key_above,)
        else:
            kept += (x[i] >= value_from,)
    if BY_KEY and not WHOLE:
        inside = ()
        for i in tl.static_range(4):
            inside += (kept[i] & ((offs + i >= first) & (offs + i < last)),)
        return inside
    else:
        return kept


@triton.jit
def count_four(kept):
    """How many of 4 adjacent columns are kept, per lane."""
    return kept[0].to(tl.uint32) + kept[1].to(tl.uint32) + kept[2].to(tl.uint32) + kept[3].to(tl.uint32)


@triton.jit
def byte(words, i: tl.constexpr):
    return ((words >> (8 * i)) & 0xFF).to(tl.int32)


@triton.jit
def store_four(ptrs, kept, x, column):
    """Store those kept of 4 adjacent columns one after the other, as pairs."""
    place = tl.zeros(column.shape, tl.int32)
    for i in tl.static_range(4):
        tl.store(ptrs + place, pack(x[i], column + i), mask=kept[i])
        place += kept[i].to(tl.int32)


@triton.jit
def append_tile(
    out, count, capacity, tile, column, first, last, key_above, value_from, WHOLE: tl.constexpr,
    BY_KEY: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Append the kept elements of a tile to `out` as pairs, by ascending column; return the new count.

    Kept are elements [first, last) of the tile, whose first column is `column`, with an order key above `key_above`
    (BY_KEY) or with values from `value_from` on. Pairs past `capacity` are not stored. Only totals cross warps.
    """
    offs = lane_columns(WARPS)
    kept = ()
    for quarter in tl.static_range(4):
        kept += (wanted(tile[quarter], offs + 128 * quarter, first, last, key_above, value_from, WHOLE, BY_KEY),)
    # A byte holds a quarter's count in a warp, 128 at most, so one sum and one scan serve all four.
    counts = count_four(kept[0])
    for quarter in tl.static_range(1, 4):
        counts |= count_four(kept[quarter]) << 8 * quarter
    before = tl.cumsum(counts, 1) - counts
    warp = tl.sum(counts, 1)
    of_warp = byte(warp, 0) + byte(warp, 1) + byte(warp, 2) + byte(warp, 3)
    total = tl.sum(of_warp)
    if count + total <= capacity:
        place = (tl.cumsum(of_warp, 0) - of_warp)[:, None]
        target = out + count
        at = column + offs
        for quarter in tl.static_range(4):
            store_four(target + (place + byte(before, quarter)), kept[quarter], tile[quarter], at + 128 * quarter)
            place += byte(warp, quarter)[:, None]
    return count + total
