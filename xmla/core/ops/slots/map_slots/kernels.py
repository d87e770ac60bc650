import triton
import triton.language as tl

from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.offsets import multiple, offset_of
from xmla.core.lang.requests import request_of_token


@triton.jit
def map_row(
    token, indices_ptr, index_stride, num_keys, table_row, width, length, slots_ptr, counts_ptr, MAPPING: tl.constexpr
):
    """Store the slots of a token's positions, by its request's `width` pages, and their number."""
    PAGE_SIZE: tl.constexpr = MAPPING.PAGE_SIZE
    BLOCK_K: tl.constexpr = MAPPING.BLOCK_K
    indices = indices_ptr + offset_of(token, index_stride)
    slots = slots_ptr + offset_of(token, num_keys)
    count = 0
    for first in tl.range(0, BLOCK_K if MAPPING.ONE_STEP else num_keys, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        index = tl.load(indices + offs_k, mask=offs_k < num_keys, other=-1)
        inside = (index >= 0) & (index // PAGE_SIZE < width)
        if MAPPING.HAS_LENGTHS:
            inside &= index < length
        page = tl.load(table_row + index // PAGE_SIZE, mask=inside, other=-1)
        slot = offset_of(page, PAGE_SIZE) + index % PAGE_SIZE
        ok = (page >= 0) & (slot <= 0x7FFFFFFF)
        if MAPPING.COMPACT:
            place = count + tl.cumsum(ok.to(tl.int32), 0) - 1
            tl.store(slots + place, slot.to(tl.int32), mask=ok)
        else:
            tl.store(slots + offs_k, tl.where(ok, slot, -1).to(tl.int32), mask=offs_k < num_keys)
        count += tl.sum(ok.to(tl.int32))
    if MAPPING.COMPACT:
        for first in tl.range(0, BLOCK_K if MAPPING.ONE_STEP else num_keys, BLOCK_K):
            offs_k = first + tl.arange(0, BLOCK_K)
            tl.store(slots + offs_k, -1, mask=(offs_k >= count) & (offs_k < num_keys))
    tl.store(counts_ptr + token, count)


@triton.jit
def map_slots_kernel(
    indices_ptr,  # [T, K] i32
    block_table_ptr,  # [B, M] i32
    request_ids_ptr,  # [T] i32 if MAPPING.HAS_REQUEST_IDS
    lengths_ptr,  # [T] i32 if MAPPING.HAS_LENGTHS
    num_keys,  # K
    index_stride,
    num_requests,
    table_stride,
    table_width,
    next_n,  # tokens per request, without request ids
    slots_ptr,  # [T, K] i32
    counts_ptr,  # [T] i32
    UNIT: tl.constexpr,  # of K and of the stride
    MAPPING: tl.constexpr,  # Mapping
    OVERLAP_LIMIT: tl.constexpr,
):
    let_next_start(OVERLAP_LIMIT)
    wait_for_earlier(OVERLAP_LIMIT)
    token = tl.program_id(0).to(tl.int64)
    request = request_of_token(request_ids_ptr, tl.program_id(0), num_requests, next_n, MAPPING.HAS_REQUEST_IDS)
    width = tl.where(request >= 0, table_width, 0)
    table_row = block_table_ptr + offset_of(request, table_stride)
    length = tl.load(lengths_ptr + token) if MAPPING.HAS_LENGTHS else 0
    map_row(
        token, indices_ptr, multiple(index_stride, UNIT), multiple(num_keys, UNIT), table_row, width, length, slots_ptr,
        counts_ptr, MAPPING,
    )  # fmt: skip
