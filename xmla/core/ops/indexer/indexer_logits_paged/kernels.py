import triton
import triton.language as tl

from xmla.core.lang.indexer import head_scores, heads_of_tile, load_page_keys, load_pages, load_query
from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.offsets import offset_of


@triton.jit
def count_tiles(
    lengths_ptr, group, num_groups, capacity, next_n, groups_a_request, GROUP: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of keys that each group [BLOCK_G] reads: those of its longest token."""
    first_token = group // groups_a_request * next_n + group % groups_a_request * GROUP
    longest = tl.zeros([BLOCK_G], tl.int32)
    for member in tl.static_range(GROUP):
        in_request = (group < num_groups) & (group % groups_a_request * GROUP + member < next_n)
        longest = tl.maximum(longest, tl.load(lengths_ptr + first_token + member, mask=in_request, other=0))
    return tl.cdiv(tl.minimum(longest, capacity), BLOCK_N)


@triton.jit
def indexer_logits_paged_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    request_ids_ptr,  # [T] i32 if PAGES.HAS_REQUEST_IDS
    num_groups,  # groups of up to GROUP adjacent tokens of one request
    num_requests,
    num_pages,
    max_len,
    table_stride,
    capacity,  # min(max_len, M · R)
    next_n,  # tokens per request; 1 with request ids
    groups_a_request,
    logits_ptr,  # [T, max_len] f32
    C: tl.constexpr,  # PagedLogits
):
    QUERY: tl.constexpr = C.QUERY
    HEADS: tl.constexpr = QUERY.HEADS
    D: tl.constexpr = QUERY.D
    BLOCK_I: tl.constexpr = QUERY.BLOCK_I
    FORMAT: tl.constexpr = C.KEYS.FORMAT
    PAGE_STRIDE: tl.constexpr = C.PAGES.PAGE_STRIDE
    PAGE_SIZE: tl.constexpr = C.PAGES.PAGE_SIZE
    GROUP: tl.constexpr = C.GROUP
    BLOCK_G: tl.constexpr = C.BLOCK_G
    BLOCK_N: tl.constexpr = C.BLOCK_N
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    offs_d = tl.arange(0, D)
    offs_g = tl.arange(0, BLOCK_G)
    member = tl.arange(0, GROUP)
    row_member, row_head = heads_of_tile(GROUP, BLOCK_I, C.KEYS.RUN)  # of each row of q

    # All groups' tiles of keys form a list, of which each program takes an equal run. The list follows from the
    # lengths, so each program finds its run without the others.
    total = tl.zeros([], tl.int64)
    for base in tl.range(0, num_groups, BLOCK_G):
        tiles = count_tiles(
            lengths_ptr, base + offs_g, num_groups, capacity, next_n, groups_a_request, GROUP, BLOCK_G, BLOCK_N
        )
        total += tl.sum(tiles)
    run_first = total * tl.program_id(0) // tl.num_programs(0)
    run_last = total * (tl.program_id(0) + 1) // tl.num_programs(0)

    passed = tl.zeros([], tl.int64)
    for base in tl.range(0, num_groups, BLOCK_G):
        tiles = count_tiles(
            lengths_ptr, base + offs_g, num_groups, capacity, next_n, groups_a_request, GROUP, BLOCK_G, BLOCK_N
        )
        ends = passed + tl.cumsum(tiles, 0)  # [BLOCK_G], positions in the list
        begins = ends - tiles
        first_group = tl.sum((ends <= run_first).to(tl.int32))
        last_group = tl.sum((begins < run_last).to(tl.int32))
        # From 0: Triton loses all alignment inside a loop that starts at the result of a reduction.
        for step in tl.range(0, last_group - first_group):
            place = first_group + step
            begin = tl.sum(tl.where(offs_g == place, begins, 0))
            end = tl.sum(tl.where(offs_g == place, ends, 0))
            first_tile = (tl.maximum(run_first, begin) - begin).to(tl.int32)
            last_tile = (tl.minimum(run_last, end) - begin).to(tl.int32)

            group = base + place
            part = group % groups_a_request * GROUP  # the group's first token, of the request's
            request = group // groups_a_request
            first_token = request * next_n + part
            if C.PAGES.HAS_REQUEST_IDS:
                request = tl.load(request_ids_ptr + group)
            known = (request >= 0) & (request < num_requests)
            table_row = block_table_ptr + offset_of(request, table_stride)

            row_ok = (row_head < HEADS) & (part + row_member < next_n)
            row_token = (first_token + row_member).to(tl.int64)
            q_row = offset_of(row_token, QUERY.Q_STRIDE_T) + offset_of(row_head, QUERY.Q_STRIDE_I, HEADS)
            q = load_query(q8_ptr + q_row[:, None] + offs_d[None, :], row_ok[:, None])
            weight_ptrs = weights_ptr + offset_of(row_token, QUERY.WEIGHT_STRIDE) + row_head
            weights = tl.load(weight_ptrs, mask=row_ok, other=0.0)
            token = first_token + member
            length = tl.load(lengths_ptr + token, mask=part + member < next_n, other=0)
            length = tl.minimum(length, capacity)  # [GROUP]
            mapped = tl.where(known, tl.max(length), 0)  # keys that the block table maps
            out_row = offset_of(token[None, :], max_len)

            # A tile's page ids are loaded one tile ahead, so that its keys wait for one load instead of two.
            coming = load_pages(table_row, first_tile * BLOCK_N + tl.arange(0, BLOCK_N), mapped, PAGE_SIZE)
            for tile in tl.range(0, last_tile - first_tile):
                key = (first_tile + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
                page = coming
                coming = load_pages(table_row, key + BLOCK_N, mapped, PAGE_SIZE)
                keys, factors, ok = load_page_keys(cache_ptr, page, key, num_pages, PAGE_STRIDE, PAGE_SIZE, D, FORMAT)
                scores = head_scores(keys, q, weights, factors, GROUP, C.KEYS)  # [BLOCK_N, GROUP] f32
                scores = tl.where(ok[:, None], scores, float("-inf"))
                tl.store(logits_ptr + out_row + key[:, None], scores, mask=key[:, None] < length[None, :])
        passed += tl.sum(tiles)
