"""The Gluon kernels for Hopper over fp8 keys, contiguous and on pages: the portable kernels' bits.

As in indexer_logits/gluon_sm90, but that a tile's keys are PIECES of PIECE keys, blocks or parts of blocks. The keys of
a piece lie one after the other, on one page, so that a thread copies 16 bytes of each from one address on. CTAs of a
token have equal runs of its tiles. Of a token with fewer keys than columns each CTA finds the end of the blocks first:
the columns after it have no key.

    tile t    keys have arrived → dots = K·Qᵀ starts
              copies of tile t + STAGES − 1 start; the pages of the tile after it are loaded, and the blocks of the next
              dots → sum over heads, times the key's scale; −inf of columns without a key → logits
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
from xmla.core.ops.selection.select_topk.gluon_sm90.kernel import row_range

PIECE = gl.constexpr(8)  # adjacent keys
PIECES = gl.constexpr(KEYS.value // PIECE.value)  # of a tile
STEP = gl.constexpr(2048)  # blocks of a list that are looked at together

# A tile's rows [PIECES, PIECE], of one axis of dims: a warp has the rows that it has of a product, see `layout_by_key`.
ROWS_OF_TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        [],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [8, 0, 0]],
        [[2, 0, 0], [4, 0, 0]],
        [],
        [PIECES.value, PIECE.value, 1],
    )
)
BY_PIECE = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, ROWS_OF_TILE)))


@gluon.constexpr_function
def copies(dims):
    """Registers of pointers to a tile's keys [PIECES, PIECE, dims], 16 bytes of a key at once."""
    chunks = [[0, 0, 1 << bit] for bit in range(4, dims.bit_length() - 1)]
    keys = [[0, 1 << bit, 0] for bit in range(3)]
    split = 3 - len(chunks)
    return gl.DistributedLinearLayout(
        [*[[0, 0, 1 << bit] for bit in range(4)], *keys[split:]],
        [*chunks, *keys[:split], [1, 0, 0], [8, 0, 0]],
        [[2, 0, 0], [4, 0, 0]],
        [],
        [PIECES.value, PIECE.value, dims],
    )


@gluon.jit
def of_rows(of_pieces, LAYOUT: gl.constexpr):
    """A value of each piece [PIECES] as [PIECES, 1, 1], for arithmetic with a tile's rows."""
    of_pieces = gl.convert_layout(of_pieces, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(of_pieces, 1), 2)


@gluon.jit
def keys_of_piece(LAYOUT: gl.constexpr):
    """The place of a row's key in its piece, [1, PIECE, 1]."""
    key = gl.arange(0, PIECE, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(key, 0), 2)


@gluon.jit
def blocks_of(length, GRANULARITY: gl.constexpr):
    """Blocks of `length` ≥ 0 positions; their sum with a block may pass 2**31."""
    return length // GRANULARITY + (length % GRANULARITY > 0).to(gl.int32)


@gluon.jit
def end_of_blocks(blocks_row, num_columns, length, GRANULARITY: gl.constexpr):
    """Columns up to the last one of a token's blocks whose key is below `length`."""
    ends = gl.zeros([STEP], gl.int32, WORDS)
    blocks = num_columns // GRANULARITY
    for first in range(0, blocks, STEP):
        place = first + gl.arange(0, STEP, layout=WORDS)
        block = gl.load(blocks_row + place, mask=place < blocks, other=-1)
        known = (block >= 0) & (block < blocks_of(length, GRANULARITY))
        keys = gl.minimum(length - gl.where(known, block, 0) * GRANULARITY, GRANULARITY)
        ends = gl.maximum(ends, gl.where(known, place * GRANULARITY + keys, 0))
    return gl.max(ends, 0)


@gluon.jit
def load_blocks(blocks_row, first_column, end_column, GRANULARITY: gl.constexpr):
    """The block of each piece of a tile [PIECES], −1 from `end_column` on."""
    column = first_column + gl.arange(0, PIECES, layout=BY_PIECE) * PIECE
    return gl.load(blocks_row + column // GRANULARITY, mask=column < end_column, other=-1)


@gluon.jit
def find_pieces(table_row, block, first_column, length, mapped, C: gl.constexpr):
    """The position of the first key of each piece of a tile [PIECES], how many keys it has, and its page.

    The page is −1 of a piece without keys, and from `mapped` on. Contiguous keys are on page 0.
    """
    column = first_column + gl.arange(0, PIECES, layout=BY_PIECE) * PIECE
    known = (block >= 0) & (block < blocks_of(length, C.GRANULARITY))
    position = gl.where(known, block, 0) * C.GRANULARITY + column % C.GRANULARITY
    count = gl.minimum(gl.maximum(gl.where(known, length - position, 0), 0), PIECE)
    if C.PAGES is None:
        page = gl.where(count > 0, 0, -1)
    else:
        page_ptrs = table_row + position // C.PAGES.PAGE_SIZE
        page = gl.load(page_ptrs, mask=(count > 0) & (position < mapped), other=-1)
    return position, count, page


@gluon.jit
def copy_tile(chunk_ptrs, scale_ptrs, position, count, page, num_pages, key_smem, scale_smem, C: gl.constexpr):
    """Start copies of a tile's keys and scales, zeros where a page is missing; [PIECES] keys that are there.

    What follows the last key on its page is copied as well: its logit is not stored.
    """
    D: gl.constexpr = key_smem.shape[1]
    LAYOUT: gl.constexpr = copies(D)
    there = (page >= 0) & (page < num_pages)
    count = gl.where(there, count, 0)
    if C.PAGES is None:
        key_byte, scale_byte = offset_of(position, C.KEY_STRIDE), offset_of(position, 4)
        mask = keys_of_piece(LAYOUT) < of_rows(count, LAYOUT)
        scale_mask = keys_of_piece(ROWS_OF_TILE) < of_rows(count, ROWS_OF_TILE)
    else:
        entry = position % C.PAGES.PAGE_SIZE
        page_byte = offset_of(page, C.PAGES.PAGE_STRIDE)
        key_byte = page_byte + offset_of(entry, D, C.PAGES.PAGE_SIZE)
        scale_byte = page_byte + offset_of(entry, 4, C.PAGES.PAGE_SIZE)
        mask, scale_mask = of_rows(there, LAYOUT), of_rows(there, ROWS_OF_TILE)
    mask, key_ptrs = gl.broadcast(mask, chunk_ptrs + of_rows(key_byte, LAYOUT))
    # Triton 3.7 loses what it knows about pointers and masks in a reshape.
    key_ptrs = gl.max_contiguous(gl.multiple_of(gl.reshape(key_ptrs, (KEYS, D)), (1, 16)), (1, 16))
    mask = gl.max_constancy(gl.reshape(mask, (KEYS, D)), (1, 16))
    async_copy.async_load(key_smem, key_ptrs, mask=mask)
    mask, scale_ptrs = gl.broadcast(scale_mask, scale_ptrs + of_rows(scale_byte, ROWS_OF_TILE))
    scale_ptrs = gl.reshape(scale_ptrs, (KEYS,)).to(gl.pointer_type(gl.float32), bitcast=True)
    async_copy.async_load(scale_smem, scale_ptrs, mask=gl.reshape(mask, (KEYS,)))
    return count


@gluon.jit
def score_blocks(
    q8_ptr, weights_ptr, keys_ptr, scales_ptr, table_row, blocks_row, token, length, mapped, num_pages, num_columns,
    splits, widths_ptr, out_row, C: gl.constexpr,
):  # fmt: skip
    """Store the logits of a token's blocks, this CTA's run of them, and in the first CTA their width.

    Keys are at offsets from the pointer to bytes `keys_ptr`, their scales from `scales_ptr`, see `copy_tile`.
    """
    QUERY: gl.constexpr = C.QUERY
    GRANULARITY: gl.constexpr = C.GRANULARITY
    D: gl.constexpr = QUERY.D
    ROWS: gl.constexpr = QUERY.BLOCK_I
    STAGES: gl.constexpr = C.STAGES
    COPIES: gl.constexpr = copies(D)
    DOTS: gl.constexpr = dots_layout(ROWS)
    BY_KEY: gl.constexpr = layout_by_key(1)
    OF_KEY: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, BY_KEY))
    gl.static_assert(GRANULARITY % PIECE == 0, "a piece of keys is of one block")

    q_smem = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, D], swizzled(D))
    weight_smem = gl.allocate_shared_memory(gl.float32, [ROWS], SMEM_V)
    key_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, D], swizzled(D))
    scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], SMEM_V)
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPIES)))
    dims = gl.expand_dims(gl.expand_dims(dims, 0), 1)
    chunk_ptrs = keys_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    chunk_ptrs += offset_of(keys_of_piece(COPIES), C.KEY_STRIDE) + dims
    row_key = keys_of_piece(ROWS_OF_TILE)
    scale_ptrs = scales_ptr + row_key * 4
    offs_n = gl.arange(0, KEYS, layout=OF_KEY)
    nothing = gl.zeros([KEYS, ROWS], gl.float32, DOTS)

    q8_ptr = q8_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    load_query(q8_ptr, weights_ptr, token, 1, q_smem, weight_smem, QUERY)
    async_copy.commit_group()
    width = num_columns
    if length < num_columns:
        width = end_of_blocks(blocks_row, num_columns, length, GRANULARITY)
    tiles = gl.cdiv(width, KEYS)

    # A tile's blocks are loaded one tile before its pages, and these one tile before its keys are copied.
    split = gl.program_id(0) % splits
    at = tiles * split // splits * KEYS
    end = tiles * (split + 1) // splits * KEYS
    block = load_blocks(blocks_row, at, num_columns, GRANULARITY)
    position, count, page = find_pieces(table_row, block, at, length, mapped, C)
    block = load_blocks(blocks_row, at + KEYS, num_columns, GRANULARITY)
    counts = gl.zeros_like(count)  # of each piece 4 bits for each tile copied ahead, the last tile's lowest
    for i in gl.static_range(STAGES - 1):
        ahead = at + i * KEYS
        counts = counts << 4 | copy_tile(
            chunk_ptrs, scale_ptrs, position, count, page, gl.where(ahead < end, num_pages, 0), key_smem.index(i),
            scale_smem.index(i), C,
        )  # fmt: skip
        async_copy.commit_group()
        position, count, page = find_pieces(table_row, block, ahead + KEYS, length, mapped, C)
        block = load_blocks(blocks_row, ahead + 2 * KEYS, num_columns, GRANULARITY)

    if split == 0:
        if length >= num_columns:  # looked for while the first keys come
            width = end_of_blocks(blocks_row, num_columns, length, GRANULARITY)
        gl.store(widths_ptr + token, width)
    stage, free = 0, STAGES - 1
    while at < end:
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        dots = warpgroup_mma(key_smem.index(stage), q_smem.permute((1, 0)), nothing, use_acc=False, is_async=True)
        # Without a branch: of a tile after the last no page is there.
        ahead = at + (STAGES - 1) * KEYS
        counts = counts << 4 | copy_tile(
            chunk_ptrs, scale_ptrs, position, count, page, gl.where(ahead < end, num_pages, 0), key_smem.index(free),
            scale_smem.index(free), C,
        )  # fmt: skip
        async_copy.commit_group()
        position, count, page = find_pieces(table_row, block, ahead + KEYS, length, mapped, C)
        block = load_blocks(blocks_row, ahead + 2 * KEYS, num_columns, GRANULARITY)
        dots = warpgroup_mma_wait(0, deps=[dots])  # [KEYS, ROWS] f32
        halves = load_weights(weight_smem, DOTS)
        factors = gl.expand_dims(scale_smem.index(stage).load(OF_KEY), 1)
        scores = sum_heads(dots, halves, 1, BY_KEY) * factors  # [KEYS, 1] f32
        wanted = gl.reshape(row_key < of_rows(counts >> 4 * (STAGES - 1) & 15, ROWS_OF_TILE), (KEYS,))
        wanted = gl.convert_layout(wanted.to(gl.int32), OF_KEY) != 0
        scores = gl.where(gl.expand_dims(wanted, 1), scores, float("-inf"))
        column = gl.expand_dims(at + offs_n, 1)
        gl.store(out_row + column, scores, mask=column < num_columns)
        free = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        at += KEYS
    async_copy.wait_group(0)

    column = gl.arange(0, STEP, layout=WORDS)
    without = gl.full([STEP], float("-inf"), gl.float32, WORDS)
    for step in range(split, gl.cdiv(num_columns - tiles * KEYS, STEP), splits):
        place = tiles * KEYS + step * STEP + column
        gl.store(out_row + place, without, mask=place < num_columns)


@gluon.jit
def indexer_block_logits_sm90_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3
    key_scales_ptr,  # [N] f32
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
    C: gl.constexpr,  # HopperBlockLogits
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    row = gl.program_id(0) // splits
    token = first_row + row
    start, length = row_range(starts_ptr, ends_ptr, token, num_keys, True)
    keys_ptr = keys_ptr.to(gl.pointer_type(gl.uint8), bitcast=True) + offset_of(start, C.KEY_STRIDE)
    scales_ptr = (key_scales_ptr + start).to(gl.pointer_type(gl.uint8), bitcast=True)
    score_blocks(
        q8_ptr, weights_ptr, keys_ptr, scales_ptr, blocks_ptr, blocks_ptr + offset_of(token, blocks_stride), token,
        length, length, 1, num_columns, splits, widths_ptr, logits_ptr + offset_of(row, num_columns), C,
    )  # fmt: skip


@gluon.jit
def indexer_block_logits_paged_sm90_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales
    block_table_ptr,  # [B, M] i32
    lengths_ptr,  # [T] i32
    blocks_ptr,  # [T, BLOCKS] i32
    request_ids_ptr,  # [T] i32 if PAGES.HAS_REQUEST_IDS
    first_row,  # of those of q8
    num_requests,
    num_pages,
    table_stride,
    capacity,  # M · R
    next_n,  # tokens per request; 1 with request ids
    blocks_stride,
    num_columns,  # BLOCKS · GRANULARITY
    splits,  # programs a token
    widths_ptr,  # [T] i32
    logits_ptr,  # [T, num_columns] f32
    C: gl.constexpr,  # HopperBlockLogits
):
    gl.static_assert(C.PAGES.PAGE_SIZE % PIECE == 0, "a piece of keys is on one page")
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    row = gl.program_id(0) // splits
    token = first_row + row
    request = token // next_n
    if C.PAGES.HAS_REQUEST_IDS:
        request = gl.load(request_ids_ptr + token)
    known = (request >= 0) & (request < num_requests)
    length = gl.maximum(gl.minimum(gl.load(lengths_ptr + token), capacity), 0)
    mapped = gl.where(known, length, 0)  # keys that the block table maps
    cache = cache_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
    score_blocks(
        q8_ptr, weights_ptr, cache, cache + C.PAGES.PAGE_SIZE * C.QUERY.D,
        block_table_ptr + offset_of(request, table_stride), blocks_ptr + offset_of(token, blocks_stride), token, length,
        mapped, num_pages, num_columns, splits, widths_ptr, logits_ptr + offset_of(row, num_columns), C,
    )  # fmt: skip
