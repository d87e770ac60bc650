import triton
import triton.language as tl

from xmla.core.lang import head_scores, load_page_keys
from xmla.core.ops.indexer_topk.kernels import append, make_room


@triton.jit(
    do_not_specialize=["num_requests", "num_pages", "table_stride", "table_width", "next_n", "groups_a_request"]
)
def indexer_topk_paged_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    request_ids_ptr,  # [T] i32 if HAS_REQUEST_IDS
    num_requests,
    num_pages,
    table_stride,
    table_width,
    next_n,  # tokens a request; 1 with request ids
    groups_a_request,
    candidates_ptr,  # [T, SEGMENTS, CAPACITY] f32
    columns_ptr,  # [T, SEGMENTS, CAPACITY] i32
    counts_ptr,  # [T, SEGMENTS] i32
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_I: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    MXFP4: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_REQUEST_IDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    group = tl.program_id(0) // SEGMENTS
    segment = tl.program_id(0) % SEGMENTS
    part = group % groups_a_request * GROUP  # of the request's tokens, the first in this group
    request = group // groups_a_request
    first_token = request * next_n + part
    if HAS_REQUEST_IDS:
        request = tl.load(request_ids_ptr + group)
    known = (request >= 0) & (request < num_requests)
    table_row = block_table_ptr + request.to(tl.int64) * table_stride

    offs_d = tl.arange(0, D)
    member = tl.arange(0, GROUP)
    row_member = tl.arange(0, GROUP * BLOCK_I) // BLOCK_I  # of each row of q: its token within the group, its head
    row_head = tl.arange(0, GROUP * BLOCK_I) % BLOCK_I
    row_ok = (row_head < HEADS) & (part + row_member < next_n)
    row_token = (first_token + row_member).to(tl.int64)
    q_row = row_token * Q_STRIDE_T + row_head * Q_STRIDE_I
    q = tl.load(q8_ptr + q_row[:, None] + offs_d[None, :], mask=row_ok[:, None], other=0.0)
    weights = tl.load(weights_ptr + row_token * WEIGHT_STRIDE + row_head, mask=row_ok, other=0.0)

    token = first_token + member
    token_ok = part + member < next_n
    length = tl.load(lengths_ptr + token, mask=token_ok, other=0)
    length = tl.maximum(tl.minimum(length, table_width * PAGE_SIZE), 0)  # [GROUP]
    reach = tl.max(length)
    mapped = tl.where(known, reach, 0)  # keys that the block table maps
    tiles = tl.cdiv(tl.cdiv(reach, BLOCK_N), SEGMENTS)  # of this segment
    place = (token.to(tl.int64) * SEGMENTS + segment) * CAPACITY  # [GROUP]
    counts = tl.zeros([GROUP], tl.int32)
    thresholds = tl.zeros([GROUP], tl.uint32)
    for tile in tl.range(0, tiles):
        key = (segment * tiles + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        keys, factors, ok = load_page_keys(
            cache_ptr, table_row, key, mapped, num_pages, PAGE_STRIDE, PAGE_SIZE, D, MXFP4
        )
        scores = head_scores(keys, q, weights, factors, GROUP)  # [BLOCK_N, GROUP] f32
        scores = tl.where(ok[:, None], scores, float("-inf"))
        visible = key[:, None] < length[None, :]
        column = key[:, None] + tl.zeros([BLOCK_N, GROUP], tl.int32)
        counts = append(candidates_ptr, columns_ptr, place, counts, thresholds, scores, column, visible)
        if tl.max(counts) > CAPACITY - BLOCK_N:
            counts, thresholds = make_room(candidates_ptr, columns_ptr, place, counts, thresholds, K, GROUP, CAPACITY)
    tl.store(counts_ptr + token.to(tl.int64) * SEGMENTS + segment, counts, mask=token_ok)
