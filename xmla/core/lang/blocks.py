"""Selected blocks inside kernels: columns of a row that lists the entries of blocks one block after the other."""

import triton
import triton.language as tl

STEP = tl.constexpr(1024)  # blocks whose places are compared at once

GRANULARITIES = (1, 2, 4, 8, 16, 32, 64, 128)  # columns of a block: tiles of whole blocks are powers of two


@triton.jit
def blocks_of(length, GRANULARITY: tl.constexpr):
    """Blocks of `length` ≥ 0 positions; their sum with a block may pass 2**31."""
    return length // GRANULARITY + tl.where(length % GRANULARITY > 0, 1, 0)


@triton.jit
def entries_of_columns(blocks_row, column, num_columns, length, GRANULARITY: tl.constexpr):
    """Positions of `column` [N] of a token's selected blocks, and which of them are below `length`."""
    block = tl.load(blocks_row + column // GRANULARITY, mask=(column >= 0) & (column < num_columns), other=-1)
    known = (block >= 0) & (block < blocks_of(length, GRANULARITY))
    position = tl.where(known, block, 0) * GRANULARITY + column % GRANULARITY
    return position, known & (position < length)


@triton.jit
def end_of_blocks(blocks_row, num_columns, length, GRANULARITY: tl.constexpr):
    """Columns up to the last one of a token's selected blocks whose entry is below `length`."""
    end = 0
    blocks = num_columns // GRANULARITY
    for first in tl.range(0, blocks, STEP):
        place = first + tl.arange(0, STEP)
        block = tl.load(blocks_row + place, mask=place < blocks, other=-1)
        known = (block >= 0) & (block < blocks_of(length, GRANULARITY))
        entries = tl.minimum(length - tl.where(known, block, 0) * GRANULARITY, GRANULARITY)
        end = tl.maximum(end, tl.max(tl.where(known, place * GRANULARITY + entries, 0)))
    return end
