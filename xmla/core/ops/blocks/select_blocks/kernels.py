import triton
import triton.language as tl

from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.offsets import multiple, offset_of
from xmla.core.ops.selection.select_topk.kernels import row_range

LARGEST = tl.constexpr(3.4028234663852886e38)  # finite float32


@triton.jit
def block_maxima_kernel(
    logits_ptr,  # [T, N] f32
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    first_row,  # of those of logits
    num_columns,
    row_stride,
    k,
    num_blocks,  # of a row of N columns
    parts,  # programs a row
    block_counts_ptr,  # [T] i32, blocks of each row's range
    maxima_ptr,  # [T, num_blocks] f32
    HAS_STARTS: tl.constexpr,
    UNIT: tl.constexpr,  # of a row's first element
    GRANULARITY: tl.constexpr,
    NEWEST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    OVERLAP_LIMIT: tl.constexpr,
):
    let_next_start(OVERLAP_LIMIT)
    wait_for_earlier(OVERLAP_LIMIT)
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    start, length = row_range(starts_ptr, ends_ptr, first_row + row, num_columns, HAS_STARTS)
    count = tl.cdiv(length, GRANULARITY)
    if part == 0:
        tl.store(block_counts_ptr + first_row + row, count)
    if (count > k) & (part * BLOCK_B < count):
        block = part * BLOCK_B + tl.arange(0, BLOCK_B)
        column = block[:, None] * GRANULARITY + tl.arange(0, GRANULARITY)[None, :]
        row_ptr = logits_ptr + offset_of(row, multiple(row_stride, UNIT)) + start
        x = tl.load(row_ptr + column, mask=column < length, other=float("nan"))  # [BLOCK_B, GRANULARITY] f32
        number = x == x
        maximum = tl.max(tl.where(number, x, float("-inf")), 1)
        if NEWEST:
            maximum = tl.where(block >= count - NEWEST, float("inf"), tl.minimum(maximum, LARGEST))
            number = number | (block >= count - NEWEST)[:, None]
        maximum = tl.where(tl.max(number.to(tl.int32), 1) > 0, maximum, float("nan"))
        tl.store(maxima_ptr + offset_of(row, num_blocks) + block, maximum, mask=block < count)
