"""The Gluon kernel for Hopper over fp8 pages of a multiple of 64 keys: the portable kernel's bits.

Work is divided among CTAs as there. A CTA keeps a group's queries and weights while it loops over tiles of the group's
keys, as in indexer_logits/gluon_sm90. Its four warps copy tiles ahead, two warps for each half of a tile, which lies
on one page. In shared memory the first 32 keys of both halves precede the last 32: a product leaves rows r and r + 64
to the same warp, and so a warp has the keys of one page when it copies, scales and stores.

    CTA     tiles of all groups' keys, one list        of each group in the CTA's run
    0       group 0 ███████                            queries, weights → shared memory
            group 1 ██│                                tile t: as in indexer_logits/gluon_sm90, but that the pages of
    1               │█████████                         tile t + STAGES are loaded from the block table meanwhile
            group 2 ███│███                            a barrier, since the next group's keys take the place of these
"""

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import add, async_copy, gl, gluon
from xmla.core.lang.launches import gluon_let_next_start as let_next_start
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.kernel import (
    KEYS,
    SMEM_V,
    WORDS,
    dots_layout,
    layout_by_key,
    load_query,
    load_weights,
    sum_heads,
    swizzled,
)

HALF = gl.constexpr(KEYS.value // 2)  # keys of a tile that are on one page

# A tile's rows are [2, 2, HALF // 2]: the first or last keys of a half, the half, and the key. Layouts have an axis of
# dims more. In this one each thread has its key after a product, see `layout_by_key`.
ROWS_OF_TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        [],
        [[0, 0, 8, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[0, 0, 16, 0], [0, 1, 0, 0]],
        [],
        [2, 2, HALF.value // 2, 1],
    )
)
HALVES = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, ROWS_OF_TILE))))


@gluon.jit
def count_tiles(lengths_ptr, group, num_groups, capacity, next_n, groups_a_request, GROUP: gl.constexpr):
    """Tiles of keys of each group: those of its longest token."""
    first_token = group // groups_a_request * next_n + group % groups_a_request * GROUP
    longest = gl.zeros_like(group)
    for member in gl.static_range(GROUP):
        in_request = (group < num_groups) & (group % groups_a_request * GROUP + member < next_n)
        longest = gl.maximum(longest, gl.load(lengths_ptr + first_token + member, mask=in_request, other=0))
    return gl.cdiv(gl.minimum(longest, capacity), KEYS)


@gluon.constexpr_function
def copies(dims):
    """Registers of pointers to a tile's keys [2, 2, HALF // 2, dims], 16 bytes of a key at once."""
    chunks = [[0, 0, 0, 1 << bit] for bit in range(4, dims.bit_length() - 1)]
    keys = [[0, 0, 1 << bit, 0] for bit in range((HALF.value // 2).bit_length() - 1)]
    split = 5 - len(chunks)
    bytes_of_chunk = [[0, 0, 0, 1 << bit] for bit in range(4)]
    return gl.DistributedLinearLayout(
        [*bytes_of_chunk, *keys[split + 1 :], [1, 0, 0, 0]],
        [*chunks, *keys[:split]],
        [keys[split], [0, 1, 0, 0]],
        [],
        [2, 2, HALF.value // 2, dims],
    )


@gluon.jit
def of_rows(of_halves, LAYOUT: gl.constexpr):
    """A value of each half [2] as [1, 2, 1, 1], for arithmetic with a tile's rows."""
    PARENT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    of_halves = gl.convert_layout(of_halves, PARENT, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(of_halves, 0), 2), 3)


@gluon.jit
def entries(LAYOUT: gl.constexpr):
    """The place of each of a tile's rows in its half, [2, 1, HALF // 2, 1]."""
    quarter = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    key = gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    quarter = gl.expand_dims(gl.expand_dims(gl.expand_dims(quarter, 1), 2), 3)
    return quarter * (HALF // 2) + gl.expand_dims(gl.expand_dims(gl.expand_dims(key, 0), 1), 3)


@gluon.jit
def load_pages(table_row, first_key, last_page, known, PAGE_SIZE: gl.constexpr):
    """The page of each half of a tile [2], that of the last key for halves after it; −1 for an unknown request."""
    half = gl.arange(0, 2, layout=HALVES)
    place = gl.minimum((first_key + half * HALF) // PAGE_SIZE, last_page)
    return gl.load(table_row + place, mask=known, other=-1)


@gluon.jit
def copy_tile(chunk_ptrs, scale_ptrs, page, first_key, num_pages, key_smem, scale_smem, PAGES: gl.constexpr):
    """Start copies of a tile's keys and scales, zeros where a page is missing; [2] ones for halves whose page is there.

    What follows the last key on its page is copied as well: it is not stored.
    """
    PAGE_SIZE: gl.constexpr = PAGES.PAGE_SIZE
    D: gl.constexpr = key_smem.shape[1]
    LAYOUT: gl.constexpr = copies(D)
    there = (page >= 0) & (page < num_pages)
    entry = (first_key + gl.arange(0, 2, layout=HALVES) * HALF) % PAGE_SIZE
    page_byte = offset_of(page, PAGES.PAGE_STRIDE)
    key_ptrs = chunk_ptrs + of_rows(page_byte + offset_of(entry, D, PAGE_SIZE), LAYOUT)
    mask, key_ptrs = gl.broadcast(of_rows(there, LAYOUT), key_ptrs)
    # Triton 3.7 loses what it knows about pointers and masks in a reshape.
    key_ptrs = gl.max_contiguous(gl.multiple_of(gl.reshape(key_ptrs, (KEYS, D)), (1, 16)), (1, 16))
    mask = gl.max_constancy(gl.reshape(mask, (KEYS, D)), (1, 16))
    async_copy.async_load(key_smem, key_ptrs, mask=mask)
    scale_ptrs += of_rows(page_byte + offset_of(entry, 4, PAGE_SIZE), ROWS_OF_TILE)
    mask, scale_ptrs = gl.broadcast(of_rows(there, ROWS_OF_TILE), scale_ptrs)
    scale_ptrs = gl.reshape(scale_ptrs, (KEYS,)).to(gl.pointer_type(gl.float32), bitcast=True)
    async_copy.async_load(scale_smem, scale_ptrs, mask=gl.reshape(mask, (KEYS,)))
    return there.to(gl.int32)


@gluon.jit
def indexer_logits_paged_sm90_kernel(
    q8_ptr,  # [T, I, D] e4m3
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
    C: gl.constexpr,  # HopperPagedLogits
):
    PAGES: gl.constexpr = C.PAGES
    PAGE_SIZE: gl.constexpr = PAGES.PAGE_SIZE
    D: gl.constexpr = C.QUERY.D
    GROUP: gl.constexpr = C.GROUP
    STAGES: gl.constexpr = C.STAGES
    BLOCK_G: gl.constexpr = C.BLOCK_G
    let_next_start(C.OVERLAP_LIMIT)
    ROWS: gl.constexpr = GROUP * C.QUERY.BLOCK_I
    COPIES: gl.constexpr = copies(D)
    DOTS: gl.constexpr = dots_layout(ROWS)
    BY_KEY: gl.constexpr = layout_by_key(GROUP)
    SCORES: gl.constexpr = gl.SliceLayout(2, BY_KEY)

    q_smem = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, D], swizzled(D))
    weight_smem = gl.allocate_shared_memory(gl.float32, [ROWS], SMEM_V)
    key_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, D], swizzled(D))
    scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], SMEM_V)

    q8_ptr = q8_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    cache = cache_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, COPIES))))
    dims = gl.expand_dims(gl.expand_dims(gl.expand_dims(dims, 0), 1), 2)
    chunk_ptrs = cache.to(gl.pointer_type(gl.float8e4nv), bitcast=True) + (entries(COPIES) * D + dims)
    row_entries = entries(ROWS_OF_TILE)
    scale_ptrs = cache + PAGE_SIZE * D + row_entries * 4
    offs_n = row_entries + of_rows(gl.arange(0, 2, layout=HALVES) * HALF, ROWS_OF_TILE)
    offs_n = gl.convert_layout(gl.reshape(offs_n, (KEYS,)), gl.SliceLayout(1, SCORES), assert_trivial=True)
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
            if PAGES.HAS_REQUEST_IDS:
                request = gl.load(request_ids_ptr + group)
            known = (request >= 0) & (request < num_requests)
            table_row = block_table_ptr + offset_of(request, table_stride)

            longest = gl.to_tensor(0)
            for i in gl.static_range(GROUP):
                if i < count:
                    longest = gl.maximum(longest, gl.load(lengths_ptr + first_token + i))
            longest = gl.minimum(longest, capacity)
            known = known & (longest > 0)
            last_page = (longest - 1) // PAGE_SIZE

            # A tile's pages are loaded one tile before its keys are copied.
            first_key = first_tile * KEYS
            end_key = last_tile * KEYS
            pages = load_pages(table_row, first_key, last_page, known, PAGE_SIZE)
            if not C.KEYS_EARLY:
                wait_for_earlier(C.OVERLAP_LIMIT)
            there = gl.zeros_like(pages)  # of each half a bit for each tile copied ahead, the last tile's lowest
            for i in gl.static_range(STAGES - 1):
                ahead = first_key + i * KEYS
                there = there << 1
                if ahead < end_key:
                    there |= copy_tile(
                        chunk_ptrs, scale_ptrs, pages, ahead, num_pages, key_smem.index(i), scale_smem.index(i),
                        PAGES,
                    )  # fmt: skip
                async_copy.commit_group()
                pages = load_pages(table_row, ahead + KEYS, last_page, known, PAGE_SIZE)

            # After the keys: the launch before this one may still write the queries.
            wait_for_earlier(C.OVERLAP_LIMIT)
            load_query(q8_ptr, weights_ptr, first_token, count, q_smem, weight_smem, C.QUERY)
            async_copy.commit_group()
            async_copy.wait_group(0)

            member = gl.arange(0, GROUP, layout=gl.SliceLayout(0, SCORES))
            length = gl.load(lengths_ptr + first_token + member, mask=member < count, other=0)
            row_end = gl.expand_dims(gl.minimum(length, capacity), 0)
            row_ptrs = logits_ptr + gl.expand_dims(offset_of(first_token + member, max_len), 0)

            stage, free = 0, STAGES - 1
            while first_key < end_key:
                async_copy.wait_group(STAGES - 2)
                fence_async_shared()
                dots = warpgroup_mma(
                    key_smem.index(stage), q_smem.permute((1, 0)), nothing, use_acc=False, is_async=True
                )
                # Without a branch: of a tile after the last no page is there.
                ahead = first_key + (STAGES - 1) * KEYS
                there = there << 1 | copy_tile(
                    chunk_ptrs, scale_ptrs, pages, ahead, gl.where(ahead < end_key, num_pages, 0),
                    key_smem.index(free), scale_smem.index(free), PAGES,
                )  # fmt: skip
                async_copy.commit_group()
                pages = load_pages(table_row, ahead + KEYS, last_page, known, PAGE_SIZE)
                dots = warpgroup_mma_wait(0, deps=[dots])  # [KEYS, ROWS] f32
                halves = load_weights(weight_smem, DOTS)
                factors = gl.expand_dims(scale_smem.index(stage).load(gl.SliceLayout(1, SCORES)), 1)
                scores = sum_heads(dots, halves, GROUP, BY_KEY) * factors  # [KEYS, GROUP] f32
                mapped, _ = gl.broadcast(of_rows(there >> (STAGES - 1) & 1, ROWS_OF_TILE), row_entries)
                mapped = gl.convert_layout(gl.reshape(mapped, (KEYS,)), gl.SliceLayout(1, SCORES), assert_trivial=True)
                scores = gl.where(gl.expand_dims(mapped != 0, 1), scores, float("-inf"))
                key = gl.expand_dims(first_key + offs_n, 1)
                gl.store(row_ptrs + key, scores, mask=key < row_end)
                free = stage
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
                first_key += KEYS
            async_copy.wait_group(0)
            gl.barrier()  # before the next group's keys are copied to where other warps may still read
        passed += gl.sum(tiles, 0)
    wait_for_earlier(C.OVERLAP_LIMIT)  # a CTA without keys, too
