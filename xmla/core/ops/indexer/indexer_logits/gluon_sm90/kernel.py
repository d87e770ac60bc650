"""The Gluon kernel for Hopper over fp8 keys: the portable kernel's bits, in fewer instructions.

A CTA keeps the queries and weights of as many tokens as fill the ROWS of heads of a product, and loops over tiles of
KEYS keys, which its four warps copy STAGES − 1 tiles ahead. The occupancy is three CTAs an SM: one sums over heads
while another multiplies. They share keys through the L2 cache alone, and do not synchronise.

    tile t    keys have arrived → dots = K·Qᵀ starts ──────────────┐ in the tensor cores
              copies of tile t + STAGES − 1 start, to where t − 1 was
              dots ◄───────────────────────────────────────────────┘
              sum over each token's heads, times the key's scale; −inf outside the token's range → logits
"""

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.indexer import gluon_heads_of_lane as heads_of_lane
from xmla.core.lang.offsets import gluon_offset_of as offset_of

ROWS = gl.constexpr(128)  # heads of all tokens of a product
KEYS = gl.constexpr(128)  # keys of a tile
STAGES = gl.constexpr(3)  # tiles of keys in shared memory
PIECE = gl.constexpr(16)  # keys of a copy: 16 bytes for each thread of four warps

# Vectors of 32-bit words in registers and in shared memory.
WORDS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SMEM_V = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def chunks(dims):
    """Registers of pointers to e4m3 rows that are copied to shared memory: 16 bytes per thread."""
    return gl.BlockedLayout([1, 16], [512 // dims, dims // 16], [4, 1], [1, 0])


@gluon.constexpr_function
def swizzled(dims):
    """Shared memory of e4m3 rows, as wgmma reads them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=dims, element_bitwidth=8, rank=2)


@gluon.constexpr_function
def dots_layout(rows):
    """Registers of a product's result [KEYS, rows]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 32])


@gluon.constexpr_function
def layout_by_key(group):
    """Registers of [KEYS, group, 4]: a thread has a key, all tokens, and the sums of the four lanes of the key's row.

    Four lanes share rows r, r + 8, r + 64 and r + 72 of the product, and take one each: the conversion stays within the
    warp.
    """
    tokens = [[0, 1 << bit, 0] for bit in range(group.bit_length() - 1)]
    keys = [[8, 0, 0], [64, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *tokens], keys, [[16, 0, 0], [32, 0, 0]], [], [KEYS.value, group, 4]
    )


@gluon.jit
def place_of_cta(num_tokens, chunk, GROUP: gl.constexpr):
    """The first of this CTA's GROUP tokens, and of its `chunk` keys; adjacent CTAs share their keys."""
    groups = gl.cdiv(num_tokens, GROUP)
    return gl.program_id(0) % groups * GROUP, gl.program_id(0) // groups * chunk


@gluon.jit
def allocate(D: gl.constexpr):
    """Shared memory of a CTA: its queries [ROWS, D], their weights [ROWS], and STAGES tiles of keys [KEYS, D]."""
    q_smem = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, D], swizzled(D))
    weight_smem = gl.allocate_shared_memory(gl.float32, [ROWS], SMEM_V)
    key_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, D], swizzled(D))
    return q_smem, weight_smem, key_smem


@gluon.jit
def copy_keys(tile_ptrs, at, start, end, smem, KEY_STRIDE: gl.constexpr):
    """Start copies of the keys from position `at` on; those outside [start, end) become zeros."""
    if (at >= start) & (at + KEYS <= end):
        for i in gl.static_range(KEYS // PIECE):
            ptrs = tile_ptrs + i * PIECE * KEY_STRIDE
            async_copy.async_load(smem.slice(i * PIECE, PIECE), ptrs)
    else:
        position = at + gl.arange(0, PIECE, layout=gl.SliceLayout(1, chunks(smem.shape[1])))
        for i in gl.static_range(KEYS // PIECE):
            wanted = gl.expand_dims((position + i * PIECE >= start) & (position + i * PIECE < end), 1)
            ptrs = tile_ptrs + i * PIECE * KEY_STRIDE
            async_copy.async_load(smem.slice(i * PIECE, PIECE), ptrs, mask=wanted)


@gluon.constexpr_function
def layout_by_lane(rows):
    """Registers of the vector [rows] that `load_weights` reads, four words at once."""
    wide = [[1 << bit] for bit in range(4, rows.bit_length() - 1)]
    return gl.DistributedLinearLayout([[1], [2], *wide], [[4], [8], [0], [0], [0]], [[0], [0]], [], [rows])


@gluon.jit
def load_weights(smem, DOTS: gl.constexpr):
    """Weights [ROWS] in the layout of a product's columns; a thread's four are adjacent in shared memory."""
    ROWS: gl.constexpr = smem.shape[0]
    weights = gl.reshape(smem.load(layout_by_lane(ROWS)), (ROWS // 16, 4, 2, 2)).permute((0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(weights, (ROWS,)), gl.SliceLayout(0, DOTS), assert_trivial=True)


@gluon.jit
def order_of_weights(place):
    """The row whose weight is at `place` in shared memory, for `load_weights`."""
    return place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2


@gluon.jit
def load_query(q8_ptr, weights_ptr, first_token, count, q_smem, weight_smem, QUERY: gl.constexpr):
    """Start the copy of the queries of `count` tokens, zeros in other rows, and store halves of their weights."""
    HEADS: gl.constexpr = QUERY.HEADS
    BLOCK_I: gl.constexpr = QUERY.BLOCK_I
    ROWS: gl.constexpr = q_smem.shape[0]
    CHUNKS: gl.constexpr = chunks(q_smem.shape[1])
    offs_d = gl.expand_dims(gl.arange(0, q_smem.shape[1], layout=gl.SliceLayout(0, CHUNKS)), 0)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, CHUNKS))
    member, head = row // BLOCK_I, row % BLOCK_I
    q_row = offset_of(first_token + member, QUERY.Q_STRIDE_T) + offset_of(head, QUERY.Q_STRIDE_I)
    ok = gl.expand_dims((member < count) & (head < HEADS), 1)
    async_copy.async_load(q_smem, q8_ptr + gl.expand_dims(q_row, 1) + offs_d, mask=ok)
    row = order_of_weights(gl.arange(0, ROWS, layout=WORDS))
    member, head = row // BLOCK_I, row % BLOCK_I
    weight_ptrs = weights_ptr + offset_of(first_token + member, QUERY.WEIGHT_STRIDE) + head
    weight_smem.store(gl.load(weight_ptrs, mask=(member < count) & (head < HEADS), other=0.0) * 0.5)


@gluon.jit
def sum_heads(dots, halves, GROUP: gl.constexpr, BY_KEY: gl.constexpr):
    """Σ relu(dots) · weight over each token's heads, [KEYS, GROUP], of dots [KEYS, ROWS] and halves of weights [ROWS].

    2 · relu(x) is x + |x|: additions run at twice the rate of a maximum. Halving a weight is exact from 2**-125 on. NaN
    stays NaN. The order is that of `lang.head_scores`: first the heads of a lane, then the lanes two apart, then
    adjacent lanes.
    """
    HEADS: gl.constexpr = dots.shape[1] // GROUP // 4  # of a token in one lane
    halves, dots = gl.broadcast(gl.expand_dims(halves, 0), dots)
    twice, halves = heads_of_lane(dots + gl.abs(dots), GROUP), heads_of_lane(halves, GROUP)
    # One after the other: a tree of additions, as Triton 3.9 makes of `gl.sum`, would round every second product.
    lanes = twice[0] * halves[0]
    for own in gl.static_range(1, HEADS):
        lanes = gl.fma(twice[own], halves[own], lanes)
    lanes = gl.convert_layout(gl.reshape(lanes, (KEYS, GROUP, 4)), BY_KEY)
    lanes = gl.reshape(lanes, (KEYS, GROUP, 2, 2))
    return gl.convert_layout(gl.sum(gl.sum(lanes, 2), 2), gl.SliceLayout(2, BY_KEY), assert_trivial=True)


@gluon.jit
def pointers_of_tile(first_ptr, KEY_STRIDE: gl.constexpr, D: gl.constexpr):
    """Pointers [PIECE, D] to PIECE keys, the first of which is at `first_ptr`."""
    CHUNKS: gl.constexpr = chunks(D)
    offs_d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, CHUNKS)), 0)
    key_row = offset_of(gl.arange(0, PIECE, layout=gl.SliceLayout(1, CHUNKS)), KEY_STRIDE)
    return first_ptr + gl.expand_dims(key_row, 1) + offs_d


@gluon.jit
def score_tile(
    q_smem, weight_smem, key_smem, stage, free, factors, tile_ptrs, at, start, end, KEY_STRIDE: gl.constexpr,
    GROUP: gl.constexpr, BY_KEY: gl.constexpr,
):  # fmt: skip
    """Logits [KEYS, GROUP] of the tile in `stage`, whose keys have these factors; the copy of a tile ahead is started.

    That tile's keys go to `free`, the stage that nobody reads any more, from the tile's pointers on.
    """
    ROWS: gl.constexpr = q_smem.shape[0]
    DOTS: gl.constexpr = dots_layout(ROWS)
    nothing = gl.zeros([KEYS, ROWS], gl.float32, DOTS)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    dots = warpgroup_mma(
        key_smem.index(stage), q_smem.permute((1, 0)), nothing, use_acc=False, is_async=True
    )  # [KEYS, ROWS] f32
    if at + (STAGES - 1) * KEYS < end:
        ahead = at + (STAGES - 1) * KEYS
        copy_keys(tile_ptrs, ahead, start, end, key_smem.index(free), KEY_STRIDE)
    async_copy.commit_group()
    dots = warpgroup_mma_wait(0, deps=[dots])
    halves = load_weights(weight_smem, DOTS)
    return sum_heads(dots, halves, GROUP, BY_KEY) * gl.expand_dims(factors, 1)


@gluon.jit
def store_nothing(logits_ptr, first_key, count, first_token, num_tokens, num_keys, GROUP: gl.constexpr):
    """Store −inf for `count` keys from first_key on, which no token attends to."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    offs_n = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(0, TILE)), 0)
    token = gl.expand_dims(first_token + gl.arange(0, GROUP, layout=gl.SliceLayout(1, TILE)), 1)
    out_ptrs = logits_ptr + offset_of(token, num_keys) + first_key + offs_n
    nothing = gl.full([GROUP, KEYS], float("-inf"), gl.float32, TILE)
    for at in range(0, count, KEYS):
        gl.store(out_ptrs + at, nothing, mask=(token < num_tokens) & (offs_n < count - at))


@gluon.jit
def indexer_logits_sm90_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3
    key_scales_ptr,  # [N] f32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    first_row,  # of num_tokens tokens
    num_tokens,
    num_keys,
    chunk,  # keys of a CTA, a multiple of KEYS
    logits_ptr,  # [num_tokens, N] f32
    C: gl.constexpr,  # HopperLogits
):
    QUERY: gl.constexpr = C.QUERY
    D: gl.constexpr = QUERY.D
    KEY_STRIDE: gl.constexpr = C.KEY_STRIDE
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
    row_start = gl.load(starts_ptr + gl.minimum(token, num_tokens - 1))
    row_end = gl.load(ends_ptr + gl.minimum(token, num_tokens - 1))
    row_start = gl.minimum(gl.maximum(row_start, first_key) - first_key, chunk)
    row_end = gl.minimum(gl.maximum(row_end, first_key) - first_key, chunk)
    before = gl.min(row_start, 0) // KEYS * KEYS
    tiles = gl.cdiv(gl.maximum(gl.max(row_end, 0) - before, 0), KEYS)
    if gl.max(row_end, 0) <= gl.min(row_start, 0):  # no token attends to any of these keys
        tiles = 0
    store_nothing(logits_ptr, first_key, gl.where(tiles > 0, before, chunk), first_token, num_tokens, num_keys, GROUP)
    if tiles == 0:
        return
    after = gl.minimum(before + tiles * KEYS, chunk)
    store_nothing(logits_ptr, first_key + after, chunk - after, first_token, num_tokens, num_keys, GROUP)
    first_key += before
    row_start -= before
    row_end -= before
    chunk -= before
    start, end = gl.min(row_start, 0), gl.max(row_end, 0)
    all_start, all_end = gl.max(row_start, 0), gl.min(row_end, 0)

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
    token_ok = gl.expand_dims(token < num_tokens, 0)
    out_ptrs = logits_ptr + gl.expand_dims(offset_of(token, num_keys) + first_key, 0) + gl.expand_dims(offs_n, 1)
    stage, free = 0, STAGES - 1
    at = 0
    while at < end:
        position = at + offs_n
        factors = gl.load(scale_ptrs, mask=(position >= start) & (position < end), other=0.0)
        scores = score_tile(
            q_smem, weight_smem, key_smem, stage, free, factors, tile_ptrs, at, start, end, KEY_STRIDE, GROUP, BY_KEY
        )
        if (at >= all_start) & (at + KEYS <= all_end):
            gl.store(out_ptrs, scores, mask=token_ok)
        else:
            place = gl.expand_dims(position, 1)
            wanted = (place >= gl.expand_dims(row_start, 0)) & (place < gl.expand_dims(row_end, 0))
            gl.store(out_ptrs, gl.where(wanted, scores, float("-inf")), mask=token_ok & (place < chunk))
        free = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        at += KEYS
        tile_ptrs += KEYS * KEY_STRIDE
        scale_ptrs += KEYS
        out_ptrs += KEYS
    async_copy.wait_group(0)
