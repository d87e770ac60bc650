from xmla.core.lang.gluon import gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.kernel import (
    in_each,
    of_one_page,
    row_range_in_turn,
    select_row,
)


@gluon.jit
def pages_of_token(
    block_table_ptr, request_ids_ptr, num_requests, table_stride, table_width, next_n, MAPPING: gl.constexpr
):  # fmt: skip
    """The row of the block table that has this program's token's pages, and their number."""
    request = gl.program_id(0) // next_n
    if MAPPING.HAS_REQUEST_IDS:
        request = gl.load(request_ids_ptr + gl.program_id(0))
    width = gl.where((request >= 0) & (request < num_requests), table_width, 0)
    return block_table_ptr + offset_of(request, table_stride), width


@gluon.jit
def map_selected(table_row, width, k, indices_ptr, slots_ptr, counts_ptr, MAPPING: gl.constexpr, C: gl.constexpr):
    """Map the row that this program has selected; parameters as in the kernel below. Each CTA maps all of it."""
    gl.static_assert(MAPPING.ONE_STEP and not MAPPING.COMPACT and not MAPPING.HAS_LENGTHS, "whole rows, in one step")
    BLOCK: gl.constexpr = max(MAPPING.BLOCK_K, 32 * C.WARPS)
    PAGE_SIZE: gl.constexpr = MAPPING.PAGE_SIZE
    gl.barrier(cluster=C.CTAS > 1)  # other CTAs wrote what this one maps
    token = gl.program_id(0)
    place = gl.arange(0, BLOCK, layout=in_each(BLOCK // (32 * C.WARPS), C.CTAS, C.WARPS))
    row = offset_of(token, k)
    index = gl.load(indices_ptr + row + place, mask=place < k, other=-1)
    inside = (index >= 0) & (index // PAGE_SIZE < width)
    page = gl.load(table_row + index // PAGE_SIZE, mask=inside, other=-1)
    slot = offset_of(page, PAGE_SIZE) + index % PAGE_SIZE
    ok = (page >= 0) & (slot <= 0x7FFFFFFF)
    gl.store(slots_ptr + row + place, gl.where(ok, slot, -1).to(gl.int32), mask=place < k)
    gl.store(counts_ptr + token, gl.sum(ok.to(gl.int32), 0))


@gluon.jit
def select_slots_cluster_sm90_kernel(
    logits_ptr,  # [T, N] f32
    starts_ptr,  # [T] i32 if HAS_STARTS
    ends_ptr,  # [T] i32
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
    C: gl.constexpr,  # Cluster, of topk_cluster_sm90_kernel
    MAPPING: gl.constexpr,  # Mapping, of map_slots_kernel
):
    """`topk_cluster_sm90_kernel` and `map_slots_kernel` of a row."""
    let_next_start(C.OVERLAP_LIMIT)
    start, length = row_range_in_turn(starts_ptr, ends_ptr, first_row, num_columns, C)
    table_row, width = pages_of_token(
        block_table_ptr, request_ids_ptr, num_requests, table_stride, table_width, next_n, MAPPING
    )  # fmt: skip
    # Where adjacent columns do not straddle pages they are mapped as they are written, if all of them have a page.
    ADJACENT: gl.constexpr = MAPPING.PAGE_SIZE % of_one_page(C) == 0
    PAGE_SIZE: gl.constexpr = MAPPING.PAGE_SIZE if ADJACENT else 0
    mapped = select_row(
        logits_ptr, row_stride, k, start, length, first_row, indices_ptr, slots_ptr, table_row, width, C, PAGE_SIZE
    )  # fmt: skip
    if ADJACENT and mapped:
        gl.store(counts_ptr + gl.program_id(0), k)
    else:
        map_selected(table_row, width, k, indices_ptr, slots_ptr, counts_ptr, MAPPING, C)
