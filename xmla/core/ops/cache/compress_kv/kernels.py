"""A compressor in two launches, the second of which begins early and waits (core/lang/launches.py).

    keep_states_kernel       a program a token: its state
    compress_entries_kernel  a program a token: the entry it completes → pooled, normed, roped, transformed, quantised

Of a long window (V4's 128 rows of 512 dims are half a megabyte) several programs pool an entry's dims, some each:

    begin_entries_kernel     keeps states, and clears the count of an entry's programs
    compress_parts_kernel    blocks of dims pooled into the workspace; the last program of an entry finishes it

A dim is pooled in one order whatever the number of programs, so that an entry's bits do not follow from it.
"""

import triton
import triton.language as tl

from xmla.core.lang.entries import LANES, TAIL_LANES, store_entries
from xmla.core.lang.indexer import log2_of, store_keys
from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.requests import request_of_token


@triton.jit
def keep_state(
    token, kv_ptr, score_ptr, ape_ptr, positions_ptr, state_table_ptr, request_ids_ptr, state_ptr, num_requests, next_n,
    state_stride, state_width, state_pages, C: tl.constexpr,
):  # fmt: skip
    PAGE_SIZE: tl.constexpr = C.PAGE_SIZE
    WIDTH: tl.constexpr = C.WIDTH
    request = request_of_token(request_ids_ptr, token, num_requests, next_n, C.HAS_REQUEST_IDS)
    position = tl.load(positions_ptr + token)
    kept = (request >= 0) & (position >= 0) & (position // PAGE_SIZE < state_width)
    page_ptr = state_table_ptr + offset_of(request, state_stride) + position // PAGE_SIZE
    page = tl.load(page_ptr, mask=kept, other=-1)
    if (page >= 0) & (page < state_pages):
        offs_c = tl.arange(0, WIDTH)
        kv = tl.load(kv_ptr + offset_of(token, C.KV_STRIDE) + offs_c).to(tl.float32)
        score = tl.load(score_ptr + offset_of(token, C.SCORE_STRIDE) + offs_c).to(tl.float32)
        score += tl.load(ape_ptr + offset_of(position % C.RATIO, C.APE_STRIDE) + offs_c)
        row = state_ptr + offset_of(page, C.PAGE_STRIDE) + offset_of(position % PAGE_SIZE, 2 * WIDTH, PAGE_SIZE)
        tl.store(row + offs_c, kv)
        tl.store(row + WIDTH + offs_c, score)


@triton.jit
def keep_states_kernel(
    kv_ptr,  # [T, C·D]
    score_ptr,  # [T, C·D]
    ape_ptr,  # [r, C·D] f32
    positions_ptr,  # [T] i32
    state_table_ptr,  # [B, STATE_M] i32
    request_ids_ptr,  # [T] i32 if C.HAS_REQUEST_IDS
    state_ptr,  # [STATE_P, STATE_R, 2·C·D] f32, updated in place
    num_requests,
    next_n,  # tokens per request, without request ids
    state_stride,
    state_width,
    state_pages,
    C: tl.constexpr,  # States
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    keep_state(
        tl.program_id(0), kv_ptr, score_ptr, ape_ptr, positions_ptr, state_table_ptr, request_ids_ptr, state_ptr,
        num_requests, next_n, state_stride, state_width, state_pages, C,
    )  # fmt: skip


@triton.jit
def begin_entries_kernel(
    kv_ptr,  # [T, C·D]
    score_ptr,  # [T, C·D]
    ape_ptr,  # [r, C·D] f32
    positions_ptr,  # [T] i32
    state_table_ptr,  # [B, STATE_M] i32
    request_ids_ptr,  # [T] i32 if C.HAS_REQUEST_IDS
    state_ptr,  # [STATE_P, STATE_R, 2·C·D] f32, updated in place
    num_requests,
    next_n,  # tokens per request, without request ids
    state_stride,
    state_width,
    state_pages,
    num_rows,
    counts_ptr,  # [num_rows] i32
    C: tl.constexpr,  # States
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    token = tl.program_id(0)
    tl.store(counts_ptr + token, 0, mask=token < num_rows)
    keep_state(
        token, kv_ptr, score_ptr, ape_ptr, positions_ptr, state_table_ptr, request_ids_ptr, state_ptr, num_requests,
        next_n, state_stride, state_width, state_pages, C,
    )  # fmt: skip


@triton.jit
def entry_of(
    token, positions_ptr, block_table_ptr, request_ids_ptr, num_requests, next_n, table_stride, table_width, num_pages,
    num_angles, C: tl.constexpr,
):  # fmt: skip
    """A token's request, the entry that it completes, and its page, a negative one if it completes none."""
    request = request_of_token(request_ids_ptr, token, num_requests, next_n, C.HAS_REQUEST_IDS)
    position = tl.load(positions_ptr + token)
    entry = position // C.RATIO
    emits = (request >= 0) & (position >= 0) & (position % C.RATIO == C.RATIO - 1)
    emits = emits & (entry // C.PAGE_SIZE < table_width) & (entry * C.RATIO < num_angles)
    page_ptr = block_table_ptr + offset_of(request, table_stride) + entry // C.PAGE_SIZE
    page = tl.load(page_ptr, mask=emits, other=-1)
    return request, entry, tl.where(page < num_pages, page, -1)


@triton.jit
def pool_window(state_ptr, table_row, table_width, num_pages, entry, first_dim, C: tl.constexpr):
    """Σ softmax(score) · kv over the positions of an entry's window, each dim separately; and their number.

    Of the dims from `first_dim` on: [BLOCK_D].
    """
    PAGE_SIZE: tl.constexpr = C.STATE_PAGE_SIZE
    WIDTH: tl.constexpr = C.SERIES * C.D
    WINDOW: tl.constexpr = C.SERIES * C.RATIO
    BLOCK_W: tl.constexpr = C.BLOCK_W
    BLOCK_D: tl.constexpr = C.BLOCK_D
    offs_d = first_dim + tl.arange(0, BLOCK_D)
    maximum = tl.full([BLOCK_D], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_D], tl.float32)
    pooled = tl.zeros([BLOCK_D], tl.float32)
    number = 0
    for start in tl.range(0, WINDOW, BLOCK_W):
        offs_w = start + tl.arange(0, BLOCK_W)
        position = (entry - (C.SERIES - 1)) * C.RATIO + offs_w
        inside = (offs_w < WINDOW) & (position >= 0) & (position // PAGE_SIZE < table_width)
        page = tl.load(table_row + position // PAGE_SIZE, mask=inside, other=-1)
        wait_for_earlier(C.OVERLAP_LIMIT)
        ok = (page >= 0) & (page < num_pages)  # [BLOCK_W]
        # Two series: the earlier group's tokens give the first, the entry's own the second.
        row = offset_of(page, C.STATE_PAGE_STRIDE) + offset_of(position % PAGE_SIZE, 2 * WIDTH, PAGE_SIZE)
        row += offs_w // C.RATIO * C.D
        ptrs = state_ptr + row[:, None] + offs_d[None, :]
        kv = tl.load(ptrs, mask=ok[:, None], other=0.0)  # [BLOCK_W, BLOCK_D] f32
        score = tl.load(ptrs + WIDTH, mask=ok[:, None], other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2((score - base[None, :]) * LOG2E)
        rescale = tl.exp2((maximum - base) * LOG2E)
        denominator = denominator * rescale + tl.sum(weight, 0)
        pooled = pooled * rescale + tl.sum(weight * kv, 0)
        maximum = new_maximum
        number += tl.sum(ok.to(tl.int32))
    return pooled / denominator, number


@triton.jit
def rotate(x, row, D: tl.constexpr, E: tl.constexpr, BACK: tl.constexpr):
    """Rotate the last E of D dims, in pairs of neighbours, by the cosines and sines at `row`; or rotate them back."""
    even, odd = tl.split(tl.reshape(x, (D // 2, 2)))
    offs_p = tl.arange(0, D // 2) - (D - E) // 2
    roped = offs_p >= 0
    cos = tl.load(row + offs_p, mask=roped, other=1.0).to(tl.float32)
    sin = tl.load(row + E // 2 + offs_p, mask=roped, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    turned = tl.where(roped, odd * cos + even * sin, odd)
    even = tl.where(roped, even * cos - odd * sin, even)
    return tl.reshape(tl.join(even, turned), (D,))


@triton.jit
def transform(x, D: tl.constexpr):
    """x · H / √D of x [D], with the Hadamard matrix H of Sylvester's construction: H[i, j] = (−1)^popcount(i & j)."""
    for _ in tl.static_range(log2_of(D)):  # each step takes the lowest bit of a dim's number, and makes it the highest
        even, odd = tl.split(tl.reshape(x, (D // 2, 2)))
        x = tl.reshape(tl.trans(tl.join(even + odd, even - odd)), (D,))
    return x * D**-0.5


@triton.jit
def finish_entry(x, number, entry, page, norm_weight_ptr, cos_sin_ptr, cache_ptr, C: tl.constexpr):
    """Store an entry of pooled dims x [D], if its window has any position."""
    D: tl.constexpr = C.D
    if C.HAS_NORM:
        weight = tl.load(norm_weight_ptr + tl.arange(0, D)).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / D + C.EPS) * weight
    if C.E:
        x = rotate(x, cos_sin_ptr + offset_of(entry * C.RATIO, C.ANGLE_STRIDE), D, C.E, False)
    if C.HADAMARD:
        x = transform(x, D)
    slot = tl.where(number > 0, offset_of(page, C.PAGE_SIZE) + entry % C.PAGE_SIZE, -1)
    slot = slot + tl.zeros([1], tl.int64)
    ok = slot >= 0
    if D == LANES:
        no_tail = tl.zeros([1, TAIL_LANES], tl.float32)
        store_entries(cache_ptr, slot, ok, x[None, :], no_tail, C.LAYOUT, C.PAGE_STRIDE, C.PAGE_SIZE, C.MIN_EXPONENT)
    else:
        FORMAT: tl.constexpr = C.LAYOUT.format
        store_keys(cache_ptr, slot, ok, x[None, :], FORMAT, C.PAGE_STRIDE, C.PAGE_SIZE, C.MIN_EXPONENT)


@triton.jit
def compress_entries_kernel(
    norm_weight_ptr,  # [D] if C.HAS_NORM
    cos_sin_ptr,  # [S, E] if C.E
    positions_ptr,  # [T] i32
    state_ptr,  # [STATE_P, STATE_R, 2·C·D] f32
    state_table_ptr,  # [B, STATE_M] i32
    block_table_ptr,  # [B, M] i32
    request_ids_ptr,  # [T] i32 if C.HAS_REQUEST_IDS
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
    C: tl.constexpr,  # Entries
):
    let_next_start(C.OVERLAP_LIMIT)
    request, entry, page = entry_of(
        tl.program_id(0), positions_ptr, block_table_ptr, request_ids_ptr, num_requests, next_n, table_stride,
        table_width, num_pages, num_angles, C,
    )  # fmt: skip
    if page >= 0:
        table_row = state_table_ptr + offset_of(request, state_stride)
        x, number = pool_window(state_ptr, table_row, state_width, state_pages, entry, 0, C)
        finish_entry(x, number, entry, page, norm_weight_ptr, cos_sin_ptr, cache_ptr, C)
    else:
        wait_for_earlier(C.OVERLAP_LIMIT)


@triton.jit
def compress_parts_kernel(
    norm_weight_ptr,  # [D] if C.HAS_NORM
    cos_sin_ptr,  # [S, E] if C.E
    positions_ptr,  # [T] i32
    state_ptr,  # [STATE_P, STATE_R, 2·C·D] f32
    state_table_ptr,  # [B, STATE_M] i32
    block_table_ptr,  # [B, M] i32
    request_ids_ptr,  # [T] i32 if C.HAS_REQUEST_IDS
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
    num_tokens,
    chunk,  # tokens of a row, one after another, if an entry has one program
    parts,  # programs that an entry is divided among
    counts_ptr,  # [ROWS] i32: programs of a row that have pooled their part
    pooled_ptr,  # [ROWS, D] f32
    C: tl.constexpr,  # Entries
):
    D: tl.constexpr = C.D
    BLOCK_D: tl.constexpr = C.BLOCK_D
    let_next_start(C.OVERLAP_LIMIT)
    row = tl.program_id(0) // parts
    first = row * chunk
    pooled_row = pooled_ptr + offset_of(row, D)
    for token in tl.range(first, tl.minimum(first + chunk, num_tokens)):
        request, entry, page = entry_of(
            token, positions_ptr, block_table_ptr, request_ids_ptr, num_requests, next_n, table_stride, table_width,
            num_pages, num_angles, C,
        )  # fmt: skip
        if page >= 0:
            table_row = state_table_ptr + offset_of(request, state_stride)
            number = 0
            for block in tl.range(tl.program_id(0) % parts, D // BLOCK_D, parts):
                x, number = pool_window(state_ptr, table_row, state_width, state_pages, entry, block * BLOCK_D, C)
                tl.store(pooled_row + block * BLOCK_D + tl.arange(0, BLOCK_D), x)
            tl.debug_barrier()  # all threads have stored before the count tells
            before = tl.atomic_add(counts_ptr + row, 1, sem="acq_rel")
            tl.debug_barrier()
            if before % parts == parts - 1:
                x = tl.load(pooled_row + tl.arange(0, D), cache_modifier=".cg")
                finish_entry(x, number, entry, page, norm_weight_ptr, cos_sin_ptr, cache_ptr, C)
            tl.debug_barrier()  # the next token's dims take the place of these
        else:
            wait_for_earlier(C.OVERLAP_LIMIT)
