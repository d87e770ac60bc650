"""The Gluon kernel for Hopper over fp8 pages of a multiple of 64 keys: the portable kernel's bits.

Work is divided among CTAs as there. A CTA keeps a group's queries and weights while it loops over tiles of the group's
keys, as in indexer_logits/gluon_sm90.py. Its four warps copy tiles ahead, in halves of one page each.
"""

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.indexer_logits.gluon_sm90.kernel import (
    KEYS,
    PIECE,
    SMEM_V,
    WORDS,
    chunks,
    dots_layout,
    layout_by_key,
    load_query,
    load_weights,
    sum_heads,
    swizzled,
)

HALF = gl.constexpr(KEYS.value // 2)  # keys of a tile that are on one page


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def count_tiles(lengths_ptr, group, num_groups, capacity, next_n, groups_a_request, GROUP: gl.constexpr):
    """Tiles of keys of each group: those of its longest token."""
    first_token = group // groups_a_request * next_n + group % groups_a_request * GROUP
    longest = gl.zeros_like(group)
    for member in gl.static_range(GROUP):
        in_request = (group < num_groups) & (group % groups_a_request * GROUP + member < next_n)
        longest = gl.maximum(longest, gl.load(lengths_ptr + first_token + member, mask=in_request, other=0))
    return gl.cdiv(gl.minimum(longest, capacity), KEYS)


@gluon.jit
def load_pages(table_row, first_key, mapped, PAGE_SIZE: gl.constexpr):
    """The page of each half of a tile, −1 from key `mapped` on."""
    left = gl.load(table_row + first_key // PAGE_SIZE, mask=first_key < mapped, other=-1)
    right = gl.load(table_row + (first_key + HALF) // PAGE_SIZE, mask=first_key + HALF < mapped, other=-1)
    return left, right


@gluon.jit
def copy_tile(
    values_ptrs, scales_ptr, left, right, first_key, mapped, num_pages, key_smem, scale_smem,
    PAGE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Start copies of a tile's keys and scales, zeros where a key is missing; 1 if any is missing, else 0."""
    D: gl.constexpr = key_smem.shape[1]
    left_ok = (left >= 0) & (left < num_pages)
    right_ok = (right >= 0) & (right < num_pages)
    left_byte = offset_of(left, PAGE_STRIDE)
    right_byte = offset_of(right, PAGE_STRIDE)
    left_entry, right_entry = first_key % PAGE_SIZE, (first_key + HALF) % PAGE_SIZE
    left_ptrs = values_ptrs + (left_byte + offset_of(left_entry, D, PAGE_SIZE))
    right_ptrs = values_ptrs + (right_byte + offset_of(right_entry, D, PAGE_SIZE))
    word = gl.arange(0, KEYS, layout=WORDS)
    left_scales = left_byte + offset_of(left_entry, 4, PAGE_SIZE)
    right_scales = right_byte + offset_of(right_entry - HALF, 4, PAGE_SIZE)
    scale_bytes = gl.where(word < HALF, left_scales, right_scales)
    scale_ptrs = (scales_ptr + scale_bytes).to(gl.pointer_type(gl.float32), bitcast=True) + word
    missing = 1
    if left_ok & right_ok & (first_key + KEYS <= mapped):
        missing = 0
        for i in gl.static_range(HALF // PIECE):
            async_copy.async_load(key_smem.slice(i * PIECE, PIECE), left_ptrs + i * PIECE * D)
        for i in gl.static_range(HALF // PIECE):
            smem = key_smem.slice(HALF + i * PIECE, PIECE)
            async_copy.async_load(smem, right_ptrs + i * PIECE * D)
        async_copy.async_load(scale_smem, scale_ptrs)
    else:
        key = first_key + gl.arange(0, PIECE, layout=gl.SliceLayout(1, chunks(D)))
        for i in gl.static_range(HALF // PIECE):
            ok = gl.expand_dims(key + i * PIECE < mapped, 1) & left_ok
            async_copy.async_load(key_smem.slice(i * PIECE, PIECE), left_ptrs + i * PIECE * D, mask=ok)
        for i in gl.static_range(HALF // PIECE):
            ok = gl.expand_dims(key + HALF + i * PIECE < mapped, 1) & right_ok
            smem = key_smem.slice(HALF + i * PIECE, PIECE)
            async_copy.async_load(smem, right_ptrs + i * PIECE * D, mask=ok)
        ok = (first_key + word < mapped) & gl.where(word < HALF, left_ok, right_ok)
        async_copy.async_load(scale_smem, scale_ptrs, mask=ok)
    return missing


@gluon.jit
def store_scores(
    scores, whole, first_key, first_token, count, lengths_ptr, table_row, mapped, num_pages, capacity, max_len,
    logits_ptr, PAGE_SIZE: gl.constexpr, GROUP: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Store scores [KEYS, GROUP] of `count` tokens. `whole`: every token attends to every key."""
    key = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, SCORES))
    member = gl.arange(0, GROUP, layout=gl.SliceLayout(0, SCORES))
    token = first_token + member
    out_ptrs = logits_ptr + gl.expand_dims(offset_of(token, max_len), 0) + gl.expand_dims(key, 1)
    if whole:
        gl.store(out_ptrs, scores, mask=gl.expand_dims(member < count, 0))
    else:
        page = gl.load(table_row + key // PAGE_SIZE, mask=key < mapped, other=-1)
        there = gl.expand_dims((page >= 0) & (page < num_pages), 1)
        length = gl.load(lengths_ptr + token, mask=member < count, other=0)
        seen = gl.expand_dims(key, 1) < gl.expand_dims(gl.minimum(length, capacity), 0)
        gl.store(out_ptrs, gl.where(there, scores, float("-inf")), mask=seen)


@gluon.jit(
    do_not_specialize=[
        "num_groups",
        "num_requests",
        "num_pages",
        "max_len",
        "table_stride",
        "capacity",
        "next_n",
        "groups_a_request",
    ]
)
def indexer_logits_paged_sm90_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    request_ids_ptr,  # [T] i32 if HAS_REQUEST_IDS
    num_groups,  # groups of up to GROUP adjacent tokens of one request
    num_requests,
    num_pages,
    max_len,
    table_stride,
    capacity,  # min(max_len, M · R)
    next_n,  # tokens per request; 1 with request ids
    groups_a_request,
    logits_ptr,  # [T, max_len] f32
    Q_STRIDE_T: gl.constexpr,
    Q_STRIDE_I: gl.constexpr,
    WEIGHT_STRIDE: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    HAS_REQUEST_IDS: gl.constexpr,
    GROUP: gl.constexpr,  # a power of two
    STAGES: gl.constexpr,  # tiles of keys in shared memory
    BLOCK_G: gl.constexpr,  # groups whose tiles are counted at once
    BLOCK_I: gl.constexpr,
    BESIDE: gl.constexpr,
):
    let_next_start(BESIDE)
    ROWS: gl.constexpr = GROUP * BLOCK_I
    CHUNKS: gl.constexpr = chunks(D)
    DOTS: gl.constexpr = dots_layout(ROWS)
    BY_KEY: gl.constexpr = layout_by_key(GROUP)
    SCORES: gl.constexpr = gl.SliceLayout(2, BY_KEY)

    q_smem = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, D], swizzled(D))
    weight_smem = gl.allocate_shared_memory(gl.float32, [ROWS], SMEM_V)
    key_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, D], swizzled(D))
    scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], SMEM_V)

    q8_ptr = q8_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    cache = cache_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
    scales_ptr = cache + PAGE_SIZE * D
    offs_d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, CHUNKS)), 0)
    entry = gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(1, CHUNKS)) * D, 1)
    values_ptrs = cache.to(gl.pointer_type(gl.float8e4nv), bitcast=True) + entry + offs_d
    offs_g = gl.arange(0, BLOCK_G, layout=WORDS)
    nothing = gl.zeros([KEYS, ROWS], gl.float32, DOTS)

    # All groups' tiles of keys form a list, of which each CTA takes an equal run. The list follows from the lengths, so
    # each CTA finds its run without the others.
    total = gl.to_tensor(0)  # 32 bits: the logits of 2**31 tiles do not fit memory
    for base in range(0, num_groups, BLOCK_G):
        tiles = count_tiles(lengths_ptr, base + offs_g, num_groups, capacity, next_n, groups_a_request, GROUP)
        total += gl.sum(tiles, 0)
    run_first = (total.to(gl.int64) * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    run_last = (total.to(gl.int64) * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)

    passed = gl.to_tensor(0)
    for base in range(0, num_groups, BLOCK_G):
        tiles = count_tiles(lengths_ptr, base + offs_g, num_groups, capacity, next_n, groups_a_request, GROUP)
        ends = passed + gl.associative_scan(tiles, 0, add)  # [BLOCK_G], positions in the list
        begins = ends - tiles
        first_group = gl.sum((ends <= run_first).to(gl.int32), 0)
        last_group = gl.sum((begins < run_last).to(gl.int32), 0)
        # From 0: Triton loses all alignment inside a loop that starts at the result of a reduction.
        for step in range(0, last_group - first_group):
            place = first_group + step
            begin = gl.sum(gl.where(offs_g == place, begins, 0), 0)
            end = gl.sum(gl.where(offs_g == place, ends, 0), 0)
            first_tile = gl.maximum(run_first, begin) - begin
            last_tile = gl.minimum(run_last, end) - begin

            group = base + place
            part = group % groups_a_request * GROUP  # the group's first token, of the request's
            count = gl.minimum(next_n - part, GROUP)
            request = group // groups_a_request
            first_token = request * next_n + part
            if HAS_REQUEST_IDS:
                request = gl.load(request_ids_ptr + group)
            known = (request >= 0) & (request < num_requests)
            table_row = block_table_ptr + offset_of(request, table_stride)

            longest = gl.to_tensor(0)
            shortest = capacity
            for i in gl.static_range(GROUP):
                if i < count:
                    length = gl.load(lengths_ptr + first_token + i)
                    longest = gl.maximum(longest, length)
                    shortest = gl.minimum(shortest, length)
            mapped = gl.where(known, gl.minimum(longest, capacity), 0)  # keys that the block table maps

            # A tile's pages are loaded one tile before its keys are copied.
            first_key = first_tile * KEYS
            end_key = last_tile * KEYS
            left, right = load_pages(table_row, first_key, mapped, PAGE_SIZE)
            missing = gl.to_tensor(0)  # a bit for each tile copied ahead, the last tile's lowest
            for i in gl.static_range(STAGES - 1):
                ahead = first_key + i * KEYS
                if ahead < end_key:
                    missing |= copy_tile(
                        values_ptrs, scales_ptr, left, right, ahead, mapped, num_pages, key_smem.index(i),
                        scale_smem.index(i), PAGE_STRIDE, PAGE_SIZE,
                    ) << (STAGES - 2 - i)  # fmt: skip
                async_copy.commit_group()
                left, right = load_pages(table_row, ahead + KEYS, mapped, PAGE_SIZE)

            # After the keys: the launch before this one may still write the queries.
            wait_for_earlier(BESIDE)
            load_query(
                q8_ptr, weights_ptr, first_token, count, q_smem, weight_smem, Q_STRIDE_T, Q_STRIDE_I,
                WEIGHT_STRIDE, HEADS, BLOCK_I,
            )  # fmt: skip
            async_copy.commit_group()
            async_copy.wait_group(0)

            stage, free = 0, STAGES - 1
            while first_key < end_key:
                async_copy.wait_group(STAGES - 2)
                factors = gl.expand_dims(scale_smem.index(stage).load(gl.SliceLayout(1, SCORES)), 1)
                whole = ((missing >> (STAGES - 2)) & 1 == 0) & (first_key + KEYS <= shortest)
                missing = missing << 1
                ahead = first_key + (STAGES - 1) * KEYS
                if ahead < end_key:
                    missing |= copy_tile(
                        values_ptrs, scales_ptr, left, right, ahead, mapped, num_pages, key_smem.index(free),
                        scale_smem.index(free), PAGE_STRIDE, PAGE_SIZE,
                    )  # fmt: skip
                async_copy.commit_group()
                left, right = load_pages(table_row, ahead + KEYS, mapped, PAGE_SIZE)
                fence_async_shared()
                dots = warpgroup_mma(
                    key_smem.index(stage), q_smem.permute((1, 0)), nothing, use_acc=False, is_async=True
                )
                dots = warpgroup_mma_wait(0, deps=[dots])  # [KEYS, ROWS] f32
                halves = load_weights(weight_smem, DOTS)
                scores = sum_heads(dots, halves, GROUP, BY_KEY) * factors  # [KEYS, GROUP] f32
                store_scores(
                    scores, whole, first_key, first_token, count, lengths_ptr, table_row, mapped, num_pages, capacity,
                    max_len, logits_ptr, PAGE_SIZE, GROUP, SCORES,
                )  # fmt: skip
                free = stage
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
                first_key += KEYS
            async_copy.wait_group(0)
            gl.barrier()  # before the next group's keys are copied to where other warps may still read
        passed += gl.sum(tiles, 0)
    wait_for_earlier(BESIDE)  # a CTA without keys, too
