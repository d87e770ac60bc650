"""The attention kernel for Hopper: the keys of a CTA, to which few_heads.py, packed.py or plain.py attends."""

from xmla.core.lang.gluon import add, gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    HALVES,
    TILE_HEADS,
    TILE_KEYS,
    VALUE_DIMS,
    Source,
    Task,
    end_of_row,
    pool,
    rotation_of,
    tiles_of,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.few_heads import BLOCKS, FEW_HEADS, attend_few_heads
from xmla.core.ops.attention.sparse_mla.gluon_sm90.packed import attend_packed
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import attend_plain


@gluon.jit
def count_tiles(lengths_ptr, token, num_keys, HAS_LENGTHS: gl.constexpr):
    """Tiles of keys of each token in one source."""
    keys = num_keys
    if HAS_LENGTHS:
        keys = gl.minimum(gl.maximum(gl.load(lengths_ptr + token), 0), num_keys)
    return gl.cdiv(keys, TILE_KEYS)


@gluon.jit
def token_of_rank(rank, token, ok, tiles):
    """The one at `rank` of the tokens that are `ok`, ordered by their `tiles`, most first."""
    least = gl.min(gl.where(ok, tiles, 0x7FFFFFFF), 0)
    most = gl.max(gl.where(ok, tiles, -1), 0)
    chosen = rank
    if least < most:
        tiles = gl.where(ok, tiles, -1)
        while least < most:  # more than `rank` tokens have at least so many tiles as `least`
            middle = (least + most + 1) // 2
            enough = gl.sum((tiles >= middle).to(gl.int32), 0) > rank
            least = gl.where(enough, middle, least)
            most = gl.where(enough, most, middle - 1)
        equal = tiles == least
        place = gl.sum((tiles > least).to(gl.int32), 0) + gl.associative_scan(equal.to(gl.int32), 0, add) - 1
        chosen = gl.sum(gl.where(equal & (place == rank), token, 0), 0)
    return chosen


@gluon.jit
def part_of_rank(rank, num_parts, most_parts, num_tokens, token, tiles):
    """The token of a CTA's part, which of the row's parts it is, the parts of the row, and the tiles of a part.

    All rows have parts of as many tiles: of the fewest with which there are no more than `num_parts`, and of no row
    more than `most_parts`. A row without keys has a part. After the last part the token is −1.
    """
    ok = token < num_tokens
    tiles = gl.maximum(tiles, 1)
    least = gl.min(gl.where(ok, tiles, 0x7FFFFFFF), 0)
    longest = gl.max(gl.where(ok, tiles, 0), 0)
    each = gl.cdiv(longest, gl.minimum(num_parts // num_tokens, most_parts))
    parts = gl.cdiv(longest, each)
    chosen = rank // parts
    part = rank - chosen * parts
    chosen = gl.where(chosen < num_tokens, chosen, -1)
    if least < longest:
        tiles = gl.where(ok, tiles, 0)
        each = gl.maximum(gl.cdiv(gl.sum(tiles, 0), num_parts), gl.cdiv(longest, most_parts))
        while gl.sum(gl.cdiv(tiles, each), 0) > num_parts:
            each += 1
        of_rows = gl.cdiv(tiles, each)
        upto = gl.associative_scan(of_rows, 0, add)
        own = (upto - of_rows <= rank) & (rank < upto)
        part = rank - gl.sum(gl.where(own, upto - of_rows, 0), 0)
        parts = gl.sum(gl.where(own, of_rows, 0), 0)
        chosen = gl.max(gl.where(own, token, -1), 0)
    return chosen, part, parts, each


@gluon.jit
def sparse_mla_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if SOURCE.HAS_LENGTHS
    sink_ptr,  # [H] f32 if EPILOGUE.HAS_SINK
    extra_cache_ptr,  # [EXTRA_P, EXTRA_R, ROW] if EXTRA
    extra_slots_ptr,  # [T, EXTRA_K] i32 if EXTRA
    extra_lengths_ptr,  # [T] i32 if EXTRA.HAS_LENGTHS
    cos_sin_ptr,  # [S, E] if EPILOGUE.ROPE
    positions_ptr,  # [T] i32 if EPILOGUE.ROPE
    num_slots,
    num_keys,  # K
    slot_stride,
    num_extra_slots,
    num_extra_keys,  # EXTRA_K
    extra_slot_stride,
    num_positions,  # S
    num_splits,  # of a row; if DEALT the most
    split_keys,  # of K rounded up to whole tiles, then EXTRA_K; not read if DEALT or SHARED
    num_tokens,  # T
    out_ptr,  # [T, H, 512]; if SPLIT [T, num_splits, H, 512] f16, normalised, over a power of two a group of dims
    lse_ptr,  # [T, H] f32; if SPLIT [T, num_splits, 1 + groups, H] f32, in log2, and the powers
    C: gl.constexpr,  # HopperAttention
):
    let_next_start(C.OVERLAP_LIMIT)
    HEAD_BLOCKS: gl.constexpr = (C.HEADS + C.BLOCK_H - 1) // C.BLOCK_H
    pid = gl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    split = pid // HEAD_BLOCKS % num_splits
    token = pid // HEAD_BLOCKS // num_splits
    if C.PLACES > 0:
        # Every warp has all tokens, so that it counts without waiting for others; adjacent ones in adjacent lanes.
        OF_LANE: gl.constexpr = C.PLACES // 32
        index = gl.arange(0, C.PLACES, layout=gl.BlockedLayout([OF_LANE], [32], [4], [0]))
        tokens = index % OF_LANE * 32 + index // OF_LANE
        existing = gl.minimum(tokens, num_tokens - 1)  # without masks all loads are under way at once
        tiles = count_tiles(lengths_ptr, existing, num_keys, C.SOURCE.HAS_LENGTHS)
        if C.EXTRA is not None:
            tiles += count_tiles(extra_lengths_ptr, existing, num_extra_keys, C.EXTRA.HAS_LENGTHS)
        if C.DEALT:
            num_parts = gl.num_programs(0) // HEAD_BLOCKS
            token, split, parts, part_tiles = part_of_rank(
                pid // HEAD_BLOCKS, num_parts, num_splits, num_tokens, tokens, tiles
            )  # fmt: skip
            if token < 0:
                wait_for_earlier(C.OVERLAP_LIMIT)
                return
        else:
            # CTAs start in the order of their ids: those with most keys first, so that the last ones to end are short.
            token = token_of_rank(token, tokens, tokens < num_tokens, tiles)
    token = token.to(gl.int64)
    place = offset_of(token, C.HEADS)
    lse_place = place
    if C.SPLIT:
        POWERS: gl.constexpr = BLOCKS if C.BLOCK_H == FEW_HEADS else HALVES
        place = offset_of(offset_of(token, num_splits) + split, C.HEADS)
        lse_place = offset_of(place, 1 + POWERS)

    end = end_of_row(lengths_ptr, token, num_keys, C.SOURCE.HAS_LENGTHS)
    tiles_before = gl.cdiv(num_keys, TILE_KEYS)  # of the first source, before those of the second
    if C.EXTRA is not None:
        extra_end = end_of_row(extra_lengths_ptr, token, num_extra_keys, C.EXTRA.HAS_LENGTHS)
    if C.DEALT:
        tiles_before = gl.cdiv(gl.maximum(end, 0), TILE_KEYS)  # a length may be the least integer
        split_keys = part_tiles * TILE_KEYS
    elif C.SPLIT and C.SHARED:
        tiles_before = gl.cdiv(gl.maximum(end, 0), TILE_KEYS)  # a length may be the least integer
        row_tiles = tiles_before
        if C.EXTRA is not None:
            row_tiles += gl.cdiv(gl.maximum(extra_end, 0), TILE_KEYS)
        split_keys = gl.cdiv(row_tiles, num_splits) * TILE_KEYS
    first = split * split_keys
    end = gl.minimum(end, first + split_keys)
    cache = pool(cache_ptr, C.LAYOUT)
    main = Source(cache, slots_ptr + offset_of(token, slot_stride), num_slots, first, end)
    main_tiles = tiles_of(main, TILE_KEYS)
    tiles = main_tiles
    if C.EXTRA is not None:
        gl.static_assert(C.EXTRA.LAYOUT == C.LAYOUT, "both sources have entries of one layout")
        extra_first = first - tiles_before * TILE_KEYS
        extra_end = gl.minimum(extra_end, extra_first + split_keys)
        extra_first = gl.maximum(extra_first, 0)
        extra_cache = pool(extra_cache_ptr, C.LAYOUT)
        extra_slots = extra_slots_ptr + offset_of(token, extra_slot_stride)
        extra = Source(extra_cache, extra_slots, num_extra_slots, extra_first, extra_end)
        tiles = main_tiles + tiles_of(extra, TILE_KEYS)
    else:
        extra: gl.constexpr = None
    out_row, lse_row = out_ptr + offset_of(place, VALUE_DIMS), lse_ptr + lse_place
    if C.SPLIT and C.HAS_LENGTHS:
        rows = head_block * C.BLOCK_H + gl.arange(0, C.BLOCK_H, layout=gl.BlockedLayout([1], [32], [4], [0]))
        if C.DEALT and split == 0:  # the combination reads no more than the lse of parts that the row has not
            for missing in range(parts, num_splits):
                gl.store(lse_row + missing * ((1 + POWERS) * C.HEADS) + rows, float("-inf"), mask=rows < C.HEADS)
        if tiles == 0:  # fewer tiles than splits: the combination reads no more of this one than its lse
            wait_for_earlier(C.OVERLAP_LIMIT)
            gl.store(lse_row + rows, float("-inf"), mask=rows < C.HEADS)
            return
    tiles = gl.maximum(tiles, 1)  # one tile of invalid slots if there is no key

    q_row = q_ptr + offset_of(token, C.Q_STRIDE_T)
    rotation = rotation_of(cos_sin_ptr, positions_ptr, num_positions, token, C)
    task = Task(q_row, sink_ptr, rotation, out_row, lse_row, head_block)
    if C.BLOCK_H == FEW_HEADS:
        gl.static_assert(C.EXTRA is None, "the tile of few heads has one source")
        attend_few_heads(main, tiles, task, C)
    else:
        gl.static_assert(C.BLOCK_H == TILE_HEADS, "a CTA has TILE_HEADS or FEW_HEADS heads")
        if C.LAYOUT.packed:
            attend_packed(main, extra, main_tiles, tiles, task, C)
        else:
            attend_plain(main, extra, main_tiles, tiles, task, C)
