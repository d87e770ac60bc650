import triton
import triton.language as tl

from xmla.core.lang.entries import LANES, TAIL_LANES, store_entries
from xmla.core.lang.indexer import store_keys
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.requests import request_of


@triton.jit
def keep_states_kernel(
    kv_ptr,  # [T, C·D]
    score_ptr,  # [T, C·D]
    ape_ptr,  # [r, C·D] f32
    positions_ptr,  # [T] i32
    state_table_ptr,  # [B, STATE_M] i32
    request_ids_ptr,  # [T] i32 if HAS_REQUEST_IDS
    state_ptr,  # [STATE_P, STATE_R, 2·C·D] f32, updated in place
    num_requests,
    next_n,  # tokens per request, without request ids
    state_stride,
    state_width,
    state_pages,
    KV_STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr,
    APE_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_REQUEST_IDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    request = request_of(request_ids_ptr, num_requests, next_n, HAS_REQUEST_IDS)
    position = tl.load(positions_ptr + token)
    kept = (request >= 0) & (position >= 0) & (position // PAGE_SIZE < state_width)
    page_ptr = state_table_ptr + offset_of(request, state_stride) + position // PAGE_SIZE
    page = tl.load(page_ptr, mask=kept, other=-1)
    if (page >= 0) & (page < state_pages):
        offs_c = tl.arange(0, WIDTH)
        kv = tl.load(kv_ptr + offset_of(token, KV_STRIDE) + offs_c).to(tl.float32)
        score = tl.load(score_ptr + offset_of(token, SCORE_STRIDE) + offs_c).to(tl.float32)
        score += tl.load(ape_ptr + offset_of(position % RATIO, APE_STRIDE) + offs_c)
        row = state_ptr + offset_of(page, PAGE_STRIDE) + offset_of(position % PAGE_SIZE, 2 * WIDTH, PAGE_SIZE)
        tl.store(row + offs_c, kv)
        tl.store(row + WIDTH + offs_c, score)


@triton.jit
def pool_window(
    state_ptr, table_row, table_width, num_pages, first, PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RATIO: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Σ softmax(score) · kv over the WINDOW positions from `first` on, each dim separately: [D]; and their number."""
    offs_d = tl.arange(0, D)
    maximum = tl.full([D], float("-inf"), tl.float32)
    denominator = tl.zeros([D], tl.float32)
    pooled = tl.zeros([D], tl.float32)
    found = 0
    for start in tl.range(0, WINDOW, BLOCK_W):
        offs_w = start + tl.arange(0, BLOCK_W)
        position = first + offs_w
        inside = (offs_w < WINDOW) & (position >= 0) & (position // PAGE_SIZE < table_width)
        page = tl.load(table_row + position // PAGE_SIZE, mask=inside, other=-1)
        ok = (page >= 0) & (page < num_pages)  # [BLOCK_W]
        # Two series: the earlier group's tokens give the first, the entry's own the second.
        row = offset_of(page, PAGE_STRIDE) + offset_of(position % PAGE_SIZE, 2 * WIDTH, PAGE_SIZE) + offs_w // RATIO * D
        ptrs = state_ptr + row[:, None] + offs_d[None, :]
        kv = tl.load(ptrs, mask=ok[:, None], other=0.0)  # [BLOCK_W, D] f32
        score = tl.load(ptrs + WIDTH, mask=ok[:, None], other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2((score - base[None, :]) * LOG2E)
        rescale = tl.exp2((maximum - base) * LOG2E)
        denominator = denominator * rescale + tl.sum(weight, 0)
        pooled = pooled * rescale + tl.sum(weight * kv, 0)
        maximum = new_maximum
        found += tl.sum(ok.to(tl.int32))
    return pooled / denominator, found


@triton.jit
def rotate(x, row, D: tl.constexpr, E: tl.constexpr):
    """Rotate the last E of D dims, in pairs of neighbours, by the cosines and sines at `row`."""
    even, odd = tl.split(tl.reshape(x, (D // 2, 2)))
    offs_p = tl.arange(0, D // 2) - (D - E) // 2
    roped = offs_p >= 0
    cos = tl.load(row + offs_p, mask=roped, other=1.0).to(tl.float32)
    sin = tl.load(row + E // 2 + offs_p, mask=roped, other=0.0).to(tl.float32)
    turned = tl.where(roped, odd * cos + even * sin, odd)
    even = tl.where(roped, even * cos - odd * sin, even)
    return tl.reshape(tl.join(even, turned), (D,))


@triton.jit
def compress_entries_kernel(
    norm_weight_ptr,  # [D] if HAS_NORM
    cos_sin_ptr,  # [S, E] if E
    positions_ptr,  # [T] i32
    state_ptr,  # [STATE_P, STATE_R, 2·C·D] f32
    state_table_ptr,  # [B, STATE_M] i32
    block_table_ptr,  # [B, M] i32
    request_ids_ptr,  # [T] i32 if HAS_REQUEST_IDS
    cache_ptr,  # [P, R, ROW], updated in place
    num_requests,
    next_n,  # tokens per request, without request ids
    state_stride,
    state_width,
    state_pages,
    table_stride,
    table_width,
    num_pages,
    num_angles,  # S
    ANGLE_STRIDE: tl.constexpr,
    STATE_PAGE_STRIDE: tl.constexpr,
    STATE_PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RATIO: tl.constexpr,
    SERIES: tl.constexpr,  # C
    D: tl.constexpr,
    E: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    LAYOUT: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    HAS_REQUEST_IDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    request = request_of(request_ids_ptr, num_requests, next_n, HAS_REQUEST_IDS)
    position = tl.load(positions_ptr + tl.program_id(0))
    entry = position // RATIO
    emits = (request >= 0) & (position >= 0) & (position % RATIO == RATIO - 1)
    emits = emits & (entry // PAGE_SIZE < table_width) & (entry * RATIO < num_angles)
    page_ptr = block_table_ptr + offset_of(request, table_stride) + entry // PAGE_SIZE
    page = tl.load(page_ptr, mask=emits, other=-1)
    if (page >= 0) & (page < num_pages):
        x, found = pool_window(
            state_ptr, state_table_ptr + offset_of(request, state_stride), state_width, state_pages,
            (entry - (SERIES - 1)) * RATIO, STATE_PAGE_STRIDE, STATE_PAGE_SIZE, RATIO, SERIES * RATIO, SERIES * D, D,
            BLOCK_W,
        )  # fmt: skip
        if HAS_NORM:
            weight = tl.load(norm_weight_ptr + tl.arange(0, D)).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / D + EPS) * weight
        if E:
            x = rotate(x, cos_sin_ptr + offset_of(entry * RATIO, ANGLE_STRIDE), D, E)
        slot = tl.where(found > 0, offset_of(page, PAGE_SIZE) + entry % PAGE_SIZE, -1)
        slot = slot + tl.zeros([1], tl.int64)
        ok = slot >= 0
        if D == LANES:
            no_tail = tl.zeros([1, TAIL_LANES], tl.float32)
            store_entries(cache_ptr, slot, ok, x[None, :], no_tail, LAYOUT, PAGE_STRIDE, PAGE_SIZE, MIN_EXPONENT)
        else:
            MXFP4: tl.constexpr = LAYOUT.format == "mxfp4"
            store_keys(cache_ptr, slot, ok, x[None, :], MXFP4, PAGE_STRIDE, PAGE_SIZE, MIN_EXPONENT)
