import triton
import triton.language as tl

from xmla.core.lang.blocks import entries_of_columns
from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.offsets import multiple, offset_of
from xmla.core.ops.selection.select_topk.kernels import row_range


@triton.jit
def block_indices_kernel(
    blocks_ptr,  # [T, BLOCKS] i32
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    first_row,
    num_keys,  # of a request, or of all
    k,
    blocks_stride,
    num_columns,  # BLOCKS · GRANULARITY
    indices_ptr,  # [T, K] i32, columns of the blocks' logits that become positions
    HAS_STARTS: tl.constexpr,
    UNIT: tl.constexpr,  # of k
    GRANULARITY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP_LIMIT: tl.constexpr,
):
    let_next_start(OVERLAP_LIMIT)
    wait_for_earlier(OVERLAP_LIMIT)
    row = first_row + tl.program_id(0).to(tl.int64)
    _, length = row_range(starts_ptr, ends_ptr, row, num_keys, HAS_STARTS)
    blocks_row = blocks_ptr + offset_of(row, blocks_stride)
    k = multiple(k, UNIT)
    out = indices_ptr + offset_of(row, k)
    count = 0
    for first in tl.range(0, k, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        column = tl.load(out + offs_k, mask=offs_k < k, other=-1)
        position, ok = entries_of_columns(blocks_row, column, num_columns, length, GRANULARITY)
        place = count + tl.cumsum(ok.to(tl.int32), 0) - 1
        tl.debug_barrier()  # columns are read before they are overwritten
        tl.store(out + place, position, mask=ok)
        count += tl.sum(ok.to(tl.int32))
    tl.debug_barrier()
    for first in tl.range(0, k, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        tl.store(out + offs_k, -1, mask=(offs_k >= count) & (offs_k < k))
