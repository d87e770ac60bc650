"""The Gluon kernel for Hopper over fp8 keys: that of `indexer_logits`, which stores the largest logit of each block.

Blocks count from a token's start. Tiles begin where blocks of the program's tokens do; if these begin at several
places within a block, tokens of each take their turn.
"""

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.kernel import (
    KEYS,
    ROWS,
    STAGES,
    allocate,
    copy_keys,
    layout_by_key,
    load_query,
    place_of_cta,
    pointers_of_tile,
    score_tile,
)

LARGEST = gl.constexpr(3.4028234663852886e38)  # finite float32


@gluon.constexpr_function
def layout_by_block(group, granularity):
    """Registers of [KEYS / granularity, group]: those of `layout_by_key` after a reduction of each block's keys."""
    keys, warps = ([[key // granularity, 0] for key in bits] for bits in ((8, 64, 1, 2, 4), (16, 32)))
    tokens = [[0, 1 << bit] for bit in range(group.bit_length() - 1)]
    return gl.DistributedLinearLayout(tokens, keys, warps, [], [KEYS.value // granularity, group])


@gluon.jit
def load_ranges(starts_ptr, ends_ptr, token, num_tokens, num_keys):
    """First keys and ends of tokens' ranges within the keys; tokens that are not there have empty ones.

    Loaded again wherever they are needed, since registers are scarce.
    """
    row_start = gl.minimum(gl.maximum(gl.load(starts_ptr + token, mask=token < num_tokens, other=0), 0), num_keys)
    row_end = gl.load(ends_ptr + token, mask=token < num_tokens, other=0)
    return row_start, gl.maximum(gl.minimum(row_end, num_keys), row_start)


@gluon.jit
def next_shift(row_start, row_end, k, shift, GRANULARITY: gl.constexpr):
    """The next place after `shift` within a block of keys where blocks of a token begin; GRANULARITY after the last.

    Of tokens with more than k blocks: others select all of theirs.
    """
    place = row_start % GRANULARITY
    wanted = (gl.cdiv(row_end - row_start, GRANULARITY) > k) & (place > shift)
    return gl.min(gl.where(wanted, place, GRANULARITY), 0)


@gluon.jit
def block_maxima_sm90_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3
    key_scales_ptr,  # [N] f32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    first_row,  # of num_tokens tokens
    num_tokens,
    num_keys,
    num_blocks,  # of a range of num_keys
    k,
    chunk,  # keys of a CTA, a multiple of KEYS
    block_counts_ptr,  # [T] i32, blocks of each token's range
    maxima_ptr,  # [num_tokens, num_blocks] f32, of tokens with more than k blocks
    C: gl.constexpr,  # HopperMaxima
):
    QUERY: gl.constexpr = C.QUERY
    D: gl.constexpr = QUERY.D
    KEY_STRIDE: gl.constexpr = C.KEY_STRIDE
    GRANULARITY: gl.constexpr = C.GRANULARITY
    GROUP: gl.constexpr = ROWS // QUERY.BLOCK_I
    BY_KEY: gl.constexpr = layout_by_key(GROUP)
    SCORES: gl.constexpr = gl.SliceLayout(2, BY_KEY)
    BY_BLOCK: gl.constexpr = layout_by_block(GROUP, GRANULARITY)
    TOKENS: gl.constexpr = gl.SliceLayout(0, BY_BLOCK)

    q8_ptr = q8_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True) + offset_of(first_row, QUERY.Q_STRIDE_T)
    keys_ptr = keys_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    weights_ptr += offset_of(first_row, QUERY.WEIGHT_STRIDE)
    starts_ptr += first_row
    ends_ptr += first_row
    first_token, chunk_key = place_of_cta(num_tokens, chunk, GROUP)

    token = first_token + gl.arange(0, GROUP, layout=gl.SliceLayout(0, SCORES))
    row_start, row_end = load_ranges(starts_ptr, ends_ptr, token, num_tokens, num_keys)
    if chunk_key == 0:
        count = gl.cdiv(row_end - row_start, GRANULARITY)
        gl.store(block_counts_ptr + first_row + token, count, mask=token < num_tokens)
    shift = next_shift(row_start, row_end, k, -1, GRANULARITY)
    if shift == GRANULARITY:
        return

    q_smem, weight_smem, key_smem = allocate(D)
    load_query(q8_ptr, weights_ptr, first_token, num_tokens - first_token, q_smem, weight_smem, QUERY)

    key_ptrs = pointers_of_tile(keys_ptr, KEY_STRIDE, D)
    offs_n = gl.arange(0, KEYS, layout=gl.SliceLayout(1, SCORES))
    offs_b = gl.expand_dims(gl.arange(0, KEYS // GRANULARITY, layout=gl.SliceLayout(1, BY_BLOCK)), 1)
    row_ptrs = maxima_ptr + offset_of(gl.convert_layout(token, TOKENS), num_blocks)
    while shift < GRANULARITY:
        row_start, row_end = load_ranges(starts_ptr, ends_ptr, token, num_tokens, num_keys)
        count = gl.cdiv(row_end - row_start, GRANULARITY)
        now = (count > k) & (row_start % GRANULARITY == shift)
        # Positions are relative to first_key.
        first_key = chunk_key + shift
        start = gl.maximum(gl.min(gl.where(now, row_start, num_keys), 0) - first_key, 0) // KEYS * KEYS
        end = gl.minimum(gl.max(gl.where(now, row_end, 0), 0) - first_key, chunk)
        all_start = gl.max(gl.where(now, row_start, 0), 0) - first_key
        all_end = gl.min(gl.where(now, row_end, num_keys), 0) - first_key
        first_block = gl.convert_layout((first_key - row_start) // GRANULARITY, TOKENS)
        stored = gl.convert_layout(gl.where(now, count, 0), TOKENS)

        tile_ptrs = key_ptrs + offset_of(first_key + start, KEY_STRIDE)
        for i in gl.static_range(STAGES - 1):
            if start + i * KEYS < end:
                copy_keys(tile_ptrs, start + i * KEYS, start, end, key_smem.index(i), KEY_STRIDE)
            tile_ptrs += KEYS * KEY_STRIDE
            async_copy.commit_group()
        stage, free = 0, STAGES - 1
        at = start
        while at < end:
            position = at + offs_n
            factors = gl.load(key_scales_ptr + first_key + position, mask=position < end, other=0.0)
            scores = score_tile(
                q_smem, weight_smem, key_smem, stage, free, factors, tile_ptrs, at, start, end, KEY_STRIDE, GROUP,
                BY_KEY,
            )  # fmt: skip
            if (at < all_start) | (at + KEYS > all_end):
                row_start, row_end = load_ranges(starts_ptr, ends_ptr, token, num_tokens, num_keys)
                key = gl.expand_dims(first_key + position, 1)
                inside = (key >= gl.expand_dims(row_start, 0)) & (key < gl.expand_dims(row_end, 0))
                scores = gl.where(inside, scores, float("nan"))
            # NaN is the largest of nothing else.
            best = gl.max(gl.reshape(scores, (KEYS // GRANULARITY, GRANULARITY, GROUP)), 1)
            best = gl.convert_layout(best, BY_BLOCK, assert_trivial=True)  # [KEYS / GRANULARITY, GROUP]
            block = gl.expand_dims(first_block + at // GRANULARITY, 0) + offs_b
            of_token = gl.expand_dims(stored, 0)
            if C.NEWEST:
                best = gl.where(best == best, gl.minimum(best, LARGEST), best)
                best = gl.where(block >= of_token - C.NEWEST, float("inf"), best)
            gl.store(gl.expand_dims(row_ptrs, 0) + block, best, mask=(block >= 0) & (block < of_token))
            free = stage
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            at += KEYS
            tile_ptrs += KEYS * KEY_STRIDE
        async_copy.wait_group(0)
        gl.barrier()  # the last tile has been multiplied
        row_start, row_end = load_ranges(starts_ptr, ends_ptr, token, num_tokens, num_keys)
        shift = next_shift(row_start, row_end, k, shift, GRANULARITY)
