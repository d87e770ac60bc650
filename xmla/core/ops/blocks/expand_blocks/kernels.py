import triton
import triton.language as tl

from xmla.core.lang.blocks import entries_of_columns
from xmla.core.lang.offsets import multiple, offset_of


@triton.jit
def expand_blocks_kernel(
    blocks_ptr,  # [T, BLOCKS] i32
    lengths_ptr,  # [T] i32
    num_columns,  # BLOCKS · GRANULARITY
    blocks_stride,
    width,  # columns with the tail
    parts,  # programs a token
    indices_ptr,  # [T, width] i32
    UNIT: tl.constexpr,  # of width
    GRANULARITY: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = (tl.program_id(0) // parts).to(tl.int64)
    first = offset_of(tl.program_id(0) % parts, BLOCK_C)  # of all columns, which are counted in 32 bits
    column = first.to(tl.int32) + tl.arange(0, BLOCK_C)
    length = tl.maximum(tl.load(lengths_ptr + token), 0)
    complete = length // GRANULARITY * GRANULARITY
    blocks_row = blocks_ptr + offset_of(token, blocks_stride)
    position, ok = entries_of_columns(
        blocks_row, column, num_columns, complete if TAIL else length, GRANULARITY
    )  # fmt: skip
    position = tl.where(ok, position, -1)
    if TAIL:
        of_tail = complete + column - num_columns
        position = tl.where((column >= num_columns) & (of_tail < length), of_tail, position)
    width = multiple(width, UNIT)
    tl.store(indices_ptr + offset_of(token, width) + column, position, mask=column < width)
