import triton
import triton.language as tl

from xmla.core.lang.indexer import head_scores, heads_of_tile, load_page_keys, load_pages, load_query
from xmla.core.lang.offsets import offset_of
from xmla.core.ops.indexer.indexer_topk.kernels import keep_largest, take_block
from xmla.core.ops.selection.select_topk.pairs import as_packed


@triton.jit
def indexer_topk_paged_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    request_ids_ptr,  # [T] i32 if PAGES.HAS_REQUEST_IDS
    num_requests,
    num_pages,
    table_stride,
    capacity,  # M · R
    next_n,  # tokens per request; 1 with request ids
    groups_a_request,
    candidates_ptr,  # [T, SEGMENTS, CAPACITY] pairs
    counts_ptr,  # [T, SEGMENTS] i32
    scores_ptr,  # [groups, SEGMENTS, GROUP, BLOCK] f32
    C: tl.constexpr,  # PagedTopk
):
    QUERY: tl.constexpr = C.QUERY
    HEADS: tl.constexpr = QUERY.HEADS
    D: tl.constexpr = QUERY.D
    BLOCK_I: tl.constexpr = QUERY.BLOCK_I
    FORMAT: tl.constexpr = C.KEYS.FORMAT
    PAGE_STRIDE: tl.constexpr = C.PAGES.PAGE_STRIDE
    PAGE_SIZE: tl.constexpr = C.PAGES.PAGE_SIZE
    K: tl.constexpr = C.K
    GROUP: tl.constexpr = C.GROUP
    SEGMENTS: tl.constexpr = C.SEGMENTS
    CAPACITY: tl.constexpr = C.CAPACITY
    BLOCK: tl.constexpr = C.BLOCK
    BLOCK_N: tl.constexpr = C.BLOCK_N
    group = tl.program_id(0) // SEGMENTS
    segment = tl.program_id(0) % SEGMENTS
    part = group % groups_a_request * GROUP  # the group's first token, of the request's
    request = group // groups_a_request
    first_token = request * next_n + part
    if C.PAGES.HAS_REQUEST_IDS:
        request = tl.load(request_ids_ptr + group)
    known = (request >= 0) & (request < num_requests)
    table_row = block_table_ptr + offset_of(request, table_stride)

    offs_d = tl.arange(0, D)
    member = tl.arange(0, GROUP)
    row_member, row_head = heads_of_tile(GROUP, BLOCK_I, C.KEYS.RUN)  # of each row of q
    row_ok = (row_head < HEADS) & (part + row_member < next_n)
    row_token = (first_token + row_member).to(tl.int64)
    q_row = offset_of(row_token, QUERY.Q_STRIDE_T) + offset_of(row_head, QUERY.Q_STRIDE_I, HEADS)
    q = load_query(q8_ptr + q_row[:, None] + offs_d[None, :], row_ok[:, None])
    weights = tl.load(weights_ptr + offset_of(row_token, QUERY.WEIGHT_STRIDE) + row_head, mask=row_ok, other=0.0)

    token = first_token + member
    token_ok = part + member < next_n
    length = tl.load(lengths_ptr + token, mask=token_ok, other=0)
    length = tl.maximum(tl.minimum(length, capacity), 0)  # [GROUP]
    reach = tl.max(length)
    mapped = tl.where(known, reach, 0)  # keys that the block table maps
    blocks = tl.cdiv(tl.cdiv(reach, BLOCK), SEGMENTS)  # of this segment
    candidates = as_packed(candidates_ptr) + offset_of(offset_of(first_token, SEGMENTS) + segment, CAPACITY)
    scores_out = scores_ptr + offset_of(tl.program_id(0), GROUP * BLOCK)
    offs_n = tl.arange(0, BLOCK_N)
    counts = tl.zeros([GROUP], tl.int32)
    thresholds = tl.zeros([GROUP], tl.uint32)
    for block in tl.range(0, blocks):
        block_key = (segment * blocks + block) * BLOCK
        for tile in tl.range(0, tl.cdiv(tl.minimum(BLOCK, reach - block_key), BLOCK_N)):
            key = block_key + tile * BLOCK_N + offs_n
            page = load_pages(table_row, key, mapped, PAGE_SIZE)
            keys, factors, ok = load_page_keys(cache_ptr, page, key, num_pages, PAGE_STRIDE, PAGE_SIZE, D, FORMAT)
            scores = head_scores(keys, q, weights, factors, GROUP, C.KEYS)  # [BLOCK_N, GROUP] f32
            scores = tl.where(ok[:, None], scores, float("-inf"))
            tl.store(scores_out + tile * BLOCK_N + offs_n[:, None] + offset_of(member[None, :], BLOCK, GROUP), scores)
        column = tl.zeros([GROUP], tl.int32) + block_key
        counts, thresholds = take_block(
            candidates, scores_out, column, length, counts, thresholds, SEGMENTS * CAPACITY, C
        )
    tl.debug_barrier()
    for g in tl.range(0, GROUP):
        if part + g < next_n:
            count = tl.sum(tl.where(member == g, counts, 0))
            if count > K:
                keep_largest(candidates + offset_of(g, SEGMENTS * CAPACITY, GROUP), count, C)
                count = tl.full([], K, tl.int32)
            tl.store(counts_ptr + offset_of(first_token + g, SEGMENTS) + segment, count)
