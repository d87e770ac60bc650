import triton
import triton.language as tl

from xmla.core.lang import as_bytes, as_floats, head_scores, page_base


@triton.jit(do_not_specialize=["num_groups", "num_requests", "num_pages", "max_len", "num_programs"])
def indexer_logits_paged_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    cache_ptr,  # P pages of R·D values and R f32 scales
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    request_ids_ptr,  # [T] i32 if HAS_REQUEST_IDS
    num_groups,  # groups of GROUP adjacent tokens of one request
    num_requests,
    num_pages,
    max_len,
    num_programs,
    logits_ptr,  # [T, max_len] f32
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_I: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    NEXT_N: tl.constexpr,  # tokens a request; 1 with request ids
    GROUP: tl.constexpr,  # tokens that share a tile of keys
    GROUPS_A_REQUEST: tl.constexpr,
    HAS_REQUEST_IDS: tl.constexpr,
    BLOCK_G: tl.constexpr,  # groups looked at together when work is shared out
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    offs_i = tl.arange(0, BLOCK_I)
    head_ok = offs_i < HEADS
    cache = as_bytes(cache_ptr)
    capacity = tl.minimum(max_len, TABLE_WIDTH * PAGE_SIZE)

    # Work is the list of (group, tile of keys); programs take every num_programs-th item of it. The list follows from
    # the lengths, so each program finds its place in it alone.
    passed = 0
    for first_group in tl.range(0, num_groups, BLOCK_G):
        group = first_group + tl.arange(0, BLOCK_G)
        group_token = group // GROUPS_A_REQUEST * NEXT_N + group % GROUPS_A_REQUEST * GROUP
        longest = tl.zeros([BLOCK_G], tl.int32)
        for i in tl.static_range(GROUP):
            in_request = (group < num_groups) & (group % GROUPS_A_REQUEST * GROUP + i < NEXT_N)
            longest = tl.maximum(longest, tl.load(lengths_ptr + group_token + i, mask=in_request, other=0))
        tiles = tl.cdiv(tl.minimum(longest, capacity), BLOCK_N)  # [BLOCK_G]
        last = tl.cumsum(tiles, 0)
        total = tl.sum(tiles)
        pid = tl.program_id(0)
        # First item of this program among those of this block of groups.
        item = (pid - passed % num_programs + num_programs) % num_programs
        for work in tl.range(item, total, num_programs):
            place = tl.sum((last <= work).to(tl.int32))
            tile = work - tl.sum(tl.where(tl.arange(0, BLOCK_G) < place, tiles, 0))
            g = first_group + place
            first_token = g // GROUPS_A_REQUEST * NEXT_N + g % GROUPS_A_REQUEST * GROUP
            tokens = tl.minimum(NEXT_N - g % GROUPS_A_REQUEST * GROUP, GROUP)
            request = g // GROUPS_A_REQUEST
            if HAS_REQUEST_IDS:
                request = tl.load(request_ids_ptr + g)
            visible = tl.where((request >= 0) & (request < num_requests), capacity, 0)  # none of an unknown request

            key = tile * BLOCK_N + offs_n  # [BLOCK_N]
            reach = 0
            for i in tl.range(0, tokens):
                reach = tl.maximum(reach, tl.minimum(tl.load(lengths_ptr + first_token + i), visible))
            table_row = block_table_ptr + request.to(tl.int64) * TABLE_STRIDE
            page = tl.load(table_row + key // PAGE_SIZE, mask=key < reach, other=-1)
            ok = (page >= 0) & (page < num_pages)
            base = page_base(page, PAGE_STRIDE)
            offset = key % PAGE_SIZE
            raw = tl.load(cache + (base + offset * D)[:, None] + offs_d[None, :], mask=ok[:, None], other=0)
            keys = raw.to(tl.float8e4nv, bitcast=True)  # [BLOCK_N, D]
            key_scales = tl.load(as_floats(cache + base + PAGE_SIZE * D + offset * 4), mask=ok, other=0.0)

            for i in tl.range(0, tokens):
                token = (first_token + i).to(tl.int64)
                q_ptrs = q8_ptr + token * Q_STRIDE_T + offs_i[:, None] * Q_STRIDE_I + offs_d[None, :]
                q = tl.load(q_ptrs, mask=head_ok[:, None], other=0.0)  # [BLOCK_I, D]
                weights = tl.load(weights_ptr + token * WEIGHT_STRIDE + offs_i, mask=head_ok, other=0.0)
                scores = head_scores(keys, q, weights, key_scales)  # [BLOCK_N] f32
                length = tl.minimum(tl.load(lengths_ptr + token), visible)
                scores = tl.where(ok, scores, float("-inf"))
                tl.store(logits_ptr + token * max_len + key, scores, mask=key < length)
        passed += total
