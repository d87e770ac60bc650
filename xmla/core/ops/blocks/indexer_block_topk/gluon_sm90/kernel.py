"""The Gluon kernel for Hopper over fp8 keys: that of `indexer_logits`, which stores logits of listed blocks alone.

The places of a tile's blocks are loaded while the tile is multiplied.
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


@gluon.jit
def logits_at_places_sm90_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3
    key_scales_ptr,  # [N] f32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    places_ptr,  # [num_tokens, num_blocks] i32
    first_row,  # of num_tokens tokens
    num_tokens,
    num_keys,
    num_blocks,
    num_columns,
    chunk,  # keys of a CTA, a multiple of KEYS
    logits_ptr,  # [num_tokens, num_columns] f32, of keys in blocks that have a place
    C: gl.constexpr,  # HopperLogitsAtPlaces
):
    QUERY: gl.constexpr = C.QUERY
    D: gl.constexpr = QUERY.D
    KEY_STRIDE: gl.constexpr = C.KEY_STRIDE
    GRANULARITY: gl.constexpr = C.GRANULARITY
    GROUP: gl.constexpr = ROWS // QUERY.BLOCK_I
    BY_KEY: gl.constexpr = layout_by_key(GROUP)
    SCORES: gl.constexpr = gl.SliceLayout(2, BY_KEY)

    q8_ptr = q8_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True) + offset_of(first_row, QUERY.Q_STRIDE_T)
    keys_ptr = keys_ptr.to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    weights_ptr += offset_of(first_row, QUERY.WEIGHT_STRIDE)
    starts_ptr += first_row
    ends_ptr += first_row
    first_token, first_key = place_of_cta(num_tokens, chunk, GROUP)
    chunk = gl.minimum(chunk, num_keys - first_key)

    # Positions are relative to first_key, which becomes the first tile's first key below.
    token = first_token + gl.arange(0, GROUP, layout=gl.SliceLayout(0, SCORES))
    token_ok = token < num_tokens
    row_start = gl.maximum(gl.load(starts_ptr + token, mask=token_ok, other=0x7FFFFFFF), 0)
    row_end = gl.minimum(gl.load(ends_ptr + token, mask=token_ok, other=0), num_keys)
    start = gl.minimum(gl.maximum(gl.min(row_start, 0), first_key) - first_key, chunk)
    end = gl.minimum(gl.maximum(gl.max(row_end, 0), first_key) - first_key, chunk)
    if end <= start:  # no token attends to any of these keys
        return
    before = start // KEYS * KEYS
    first_key += before
    start -= before
    end -= before
    tiles = gl.cdiv(end, KEYS)

    q_smem, weight_smem, key_smem = allocate(D)
    load_query(q8_ptr, weights_ptr, first_token, num_tokens - first_token, q_smem, weight_smem, QUERY)
    tile_ptrs = pointers_of_tile(keys_ptr + offset_of(first_key, KEY_STRIDE), KEY_STRIDE, D)
    for i in gl.static_range(STAGES - 1):
        if i < tiles:
            copy_keys(tile_ptrs, i * KEYS, start, end, key_smem.index(i), KEY_STRIDE)
        tile_ptrs += KEYS * KEY_STRIDE
        async_copy.commit_group()

    offs_n = gl.arange(0, KEYS, layout=gl.SliceLayout(1, SCORES))
    scale_ptrs = key_scales_ptr + first_key + offs_n
    row_start = gl.expand_dims(row_start, 0)
    row_end = gl.expand_dims(row_end, 0)
    place_ptrs = gl.expand_dims(places_ptr + offset_of(token, num_blocks), 0)
    out_ptrs = gl.expand_dims(logits_ptr + offset_of(token, num_columns), 0)
    stage, free = 0, STAGES - 1
    at = 0
    while at < end:
        position = at + offs_n
        factors = gl.load(scale_ptrs, mask=(position >= start) & (position < end), other=0.0)
        key = gl.expand_dims(first_key + position, 1)
        block = (key - row_start) // GRANULARITY  # [KEYS, GROUP]
        place = gl.load(place_ptrs + block, mask=(key >= row_start) & (key < row_end), other=-1)
        scores = score_tile(
            q_smem, weight_smem, key_smem, stage, free, factors, tile_ptrs, at, start, end, KEY_STRIDE, GROUP, BY_KEY
        )
        column = place * GRANULARITY + (key - row_start) % GRANULARITY
        gl.store(out_ptrs + column, scores, mask=place >= 0)
        free = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        at += KEYS
        tile_ptrs += KEYS * KEY_STRIDE
        scale_ptrs += KEYS
    async_copy.wait_group(0)
