import triton
import triton.language as tl

from xmla.core.lang.blocks import end_of_blocks, entries_of_columns
from xmla.core.lang.indexer import head_scores, load_keys, load_page_keys, load_query
from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.numbers import as_bytes
from xmla.core.lang.offsets import offset_of
from xmla.core.ops.selection.select_topk.kernels import row_range


@triton.jit
def indexer_block_logits_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3 | [N, D/2] bytes
    key_scales_ptr,  # [N] f32 | i32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    blocks_ptr,  # [T, BLOCKS] i32
    first_row,  # of those of q8
    num_keys,
    blocks_stride,
    num_columns,  # BLOCKS · GRANULARITY
    splits,  # programs a token
    widths_ptr,  # [T] i32
    logits_ptr,  # [T, num_columns] f32
    C: tl.constexpr,  # BlockLogits
):
    QUERY: tl.constexpr = C.QUERY
    HEADS: tl.constexpr = QUERY.HEADS
    D: tl.constexpr = QUERY.D
    BLOCK_N: tl.constexpr = C.BLOCK_N
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    token = first_row + row
    start, length = row_range(starts_ptr, ends_ptr, token, num_keys, True)
    blocks_row = blocks_ptr + offset_of(token, blocks_stride)
    if split == 0:
        tl.store(widths_ptr + token, end_of_blocks(blocks_row, num_columns, length, C.GRANULARITY))

    head = tl.arange(0, QUERY.BLOCK_I)
    q_ptrs = q8_ptr + offset_of(token, QUERY.Q_STRIDE_T) + offset_of(head[:, None], QUERY.Q_STRIDE_I, HEADS)
    q = load_query(q_ptrs + tl.arange(0, D)[None, :], (head < HEADS)[:, None])
    weights = tl.load(weights_ptr + offset_of(token, QUERY.WEIGHT_STRIDE) + head, mask=head < HEADS, other=0.0)
    out_row = logits_ptr + offset_of(row, num_columns)
    # Programs take turns: columns without keys mostly follow those with keys.
    for tile in tl.range(split, tl.cdiv(num_columns, BLOCK_N), splits):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        position, wanted = entries_of_columns(blocks_row, column, num_columns, length, C.GRANULARITY)
        out = out_row + column[:, None] + tl.arange(0, 1)[None, :]
        if tl.max(wanted.to(tl.int32)) > 0:
            key = start + position
            scale_ptrs = as_bytes(key_scales_ptr) + offset_of(key, 4)
            keys, factors = load_keys(keys_ptr, offset_of(key, C.KEY_STRIDE), scale_ptrs, wanted, D, C.KEYS.FORMAT)
            scores = head_scores(keys, q, weights, factors, 1, C.KEYS)  # [BLOCK_N, 1] f32
            tl.store(out, tl.where(wanted[:, None], scores, float("-inf")), mask=(column < num_columns)[:, None])
        else:
            tl.store(out, float("-inf"), mask=(column < num_columns)[:, None])


@triton.jit
def indexer_block_logits_paged_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    blocks_ptr,  # [T, BLOCKS] i32 if HAS_BLOCKS; otherwise columns are all positions
    request_ids_ptr,  # [T] i32 if PAGES.HAS_REQUEST_IDS
    first_row,  # of those of q8
    num_requests,
    num_pages,
    table_stride,
    capacity,  # M · R
    next_n,  # tokens per request; 1 with request ids
    blocks_stride,
    num_columns,  # BLOCKS · GRANULARITY, or the capacity
    splits,  # programs a token
    widths_ptr,  # [T] i32
    logits_ptr,  # [T, num_columns] f32
    C: tl.constexpr,  # PagedBlockLogits
):
    QUERY: tl.constexpr = C.QUERY
    HEADS: tl.constexpr = QUERY.HEADS
    D: tl.constexpr = QUERY.D
    FORMAT: tl.constexpr = C.KEYS.FORMAT
    PAGE_STRIDE: tl.constexpr = C.PAGES.PAGE_STRIDE
    PAGE_SIZE: tl.constexpr = C.PAGES.PAGE_SIZE
    BLOCK_N: tl.constexpr = C.BLOCK_N
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    token = first_row + row
    request = (token // next_n).to(tl.int32)
    if C.PAGES.HAS_REQUEST_IDS:
        request = tl.load(request_ids_ptr + token)
    known = (request >= 0) & (request < num_requests)
    table_row = block_table_ptr + offset_of(request, table_stride)
    length = tl.maximum(tl.minimum(tl.load(lengths_ptr + token), capacity), 0)
    mapped = tl.where(known, length, 0)  # keys that the block table maps
    blocks_row = blocks_ptr + offset_of(token, blocks_stride)
    if split == 0:
        width = length
        if C.HAS_BLOCKS:
            width = end_of_blocks(blocks_row, num_columns, length, C.GRANULARITY)
        tl.store(widths_ptr + token, width)

    head = tl.arange(0, QUERY.BLOCK_I)
    q_ptrs = q8_ptr + offset_of(token, QUERY.Q_STRIDE_T) + offset_of(head[:, None], QUERY.Q_STRIDE_I, HEADS)
    q = load_query(q_ptrs + tl.arange(0, D)[None, :], (head < HEADS)[:, None])
    weights = tl.load(weights_ptr + offset_of(token, QUERY.WEIGHT_STRIDE) + head, mask=head < HEADS, other=0.0)
    out_row = logits_ptr + offset_of(row, num_columns)
    # Programs take turns: columns without keys mostly follow those with keys.
    for tile in tl.range(split, tl.cdiv(num_columns, BLOCK_N), splits):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        position, wanted = column, column < length
        if C.HAS_BLOCKS:
            position, wanted = entries_of_columns(blocks_row, column, num_columns, length, C.GRANULARITY)
        out = out_row + column[:, None] + tl.arange(0, 1)[None, :]
        if tl.max(wanted.to(tl.int32)) > 0:
            page = tl.load(table_row + position // PAGE_SIZE, mask=wanted & (position < mapped), other=-1)
            keys, factors, ok = load_page_keys(cache_ptr, page, position, num_pages, PAGE_STRIDE, PAGE_SIZE, D, FORMAT)
            scores = head_scores(keys, q, weights, factors, 1, C.KEYS)  # [BLOCK_N, 1] f32
            tl.store(out, tl.where(ok[:, None], scores, float("-inf")), mask=(column < num_columns)[:, None])
        else:
            tl.store(out, float("-inf"), mask=(column < num_columns)[:, None])
