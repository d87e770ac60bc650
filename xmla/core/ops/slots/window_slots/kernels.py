import triton
import triton.language as tl

from xmla.core.lang.offsets import multiple, offset_of
from xmla.core.lang.requests import request_of_token


@triton.jit
def window_slots_kernel(
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    request_ids_ptr,  # [T] i32 if HAS_REQUEST_IDS
    window,
    num_requests,
    table_stride,
    table_width,
    next_n,  # tokens per request, without request ids
    slots_ptr,  # [T, WINDOW] i32, WINDOW = window
    counts_ptr,  # [T] i32
    UNIT: tl.constexpr,  # of the window
    PAGE_SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    HAS_REQUEST_IDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_STEP: tl.constexpr,  # window ≤ BLOCK_K
):
    token = tl.program_id(0).to(tl.int64)
    request = request_of_token(request_ids_ptr, tl.program_id(0), num_requests, next_n, HAS_REQUEST_IDS)
    width = tl.where(request >= 0, table_width, 0)
    table_row = block_table_ptr + offset_of(request, table_stride)
    visible = tl.maximum(tl.load(lengths_ptr + token), 0) // RATIO
    visible = tl.minimum(visible.to(tl.int64), offset_of(width, PAGE_SIZE))
    window = multiple(window, UNIT)
    count = tl.minimum(visible, window)
    tl.store(counts_ptr + token, count.to(tl.int32))
    for first in tl.range(0, BLOCK_K if ONE_STEP else window, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        entry = (visible - count + offs_k).to(tl.int32)  # below 2**31 where it counts
        page = tl.load(table_row + entry // PAGE_SIZE, mask=offs_k < count, other=-1)
        slot = offset_of(page, PAGE_SIZE) + entry % PAGE_SIZE
        slot = tl.where((page >= 0) & (slot <= 0x7FFFFFFF), slot, -1)
        tl.store(slots_ptr + offset_of(token, window) + offs_k, slot.to(tl.int32), mask=offs_k < window)
