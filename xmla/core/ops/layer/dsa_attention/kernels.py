import triton
import triton.language as tl

from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.offsets import multiple, offset_of
from xmla.core.lang.requests import request_of_token
from xmla.core.ops.selection.select_topk.kernels import select_row, select_whole_row
from xmla.core.ops.slots.map_slots.kernels import map_row


@triton.jit
def map_selected(
    block_table_ptr, request_ids_ptr, k, num_requests, table_stride, table_width, next_n, indices_ptr, slots_ptr,
    counts_ptr, C: tl.constexpr, MAPPING: tl.constexpr,
):  # fmt: skip
    """Map the row that this program has selected; parameters as in the kernels below."""
    tl.debug_barrier()  # other threads wrote what this one maps
    request = request_of_token(request_ids_ptr, tl.program_id(0), num_requests, next_n, MAPPING.HAS_REQUEST_IDS)
    table_row = block_table_ptr + offset_of(request, table_stride)
    keys = multiple(k, C.UNIT)
    map_row(
        tl.program_id(0).to(tl.int64), indices_ptr, keys, keys, table_row, tl.where(request >= 0, table_width, 0), 0,
        slots_ptr, counts_ptr, MAPPING,
    )  # fmt: skip


@triton.jit
def select_slots_kernel(
    logits_ptr,  # [T, N] f32
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    candidates_ptr,  # [T, SEGMENTS, CAPACITY] pairs
    candidate_counts_ptr,  # [T, SEGMENTS] i32
    thresholds_ptr,  # [T] f32 if SEGMENTS
    block_table_ptr,  # [B, M] i32
    request_ids_ptr,  # [T] i32 if MAPPING.HAS_REQUEST_IDS
    first_row,
    num_columns,
    row_stride,
    k,
    num_requests,
    table_stride,
    table_width,
    next_n,  # tokens per request, without request ids
    indices_ptr,  # [T, K] i32
    slots_ptr,  # [T, K] i32
    counts_ptr,  # [T] i32
    C: tl.constexpr,  # Selection, of topk_select_kernel
    MAPPING: tl.constexpr,  # Mapping, of map_slots_kernel
):
    """`topk_select_kernel` and `map_slots_kernel` of a row: it is selected by one program, which then maps it."""
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    select_row(
        logits_ptr, starts_ptr, ends_ptr, candidates_ptr, candidate_counts_ptr, thresholds_ptr, first_row, num_columns,
        row_stride, k, indices_ptr, C,
    )  # fmt: skip
    map_selected(
        block_table_ptr, request_ids_ptr, k, num_requests, table_stride, table_width, next_n, indices_ptr, slots_ptr,
        counts_ptr, C, MAPPING,
    )  # fmt: skip


@triton.jit
def whole_slots_kernel(
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
    block_table_ptr,  # [B, M] i32
    request_ids_ptr,  # [T] i32 if MAPPING.HAS_REQUEST_IDS
    first_row,
    num_columns,
    k,
    num_requests,
    table_stride,
    table_width,
    next_n,  # tokens per request, without request ids
    indices_ptr,  # [T, K] i32
    slots_ptr,  # [T, K] i32
    counts_ptr,  # [T] i32
    C: tl.constexpr,  # WholeRows, of topk_whole_kernel
    MAPPING: tl.constexpr,  # Mapping, of map_slots_kernel
):
    """`topk_whole_kernel` and `map_slots_kernel` of a row."""
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    select_whole_row(starts_ptr, ends_ptr, first_row, num_columns, k, indices_ptr, C)
    map_selected(
        block_table_ptr, request_ids_ptr, k, num_requests, table_stride, table_width, next_n, indices_ptr, slots_ptr,
        counts_ptr, C, MAPPING,
    )  # fmt: skip
