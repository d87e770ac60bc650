"""The indexer inside kernels: read and write keys of every format, and compute their logits."""

import triton
import triton.language as tl
from triton.experimental import gluon

from xmla.core.lang.numbers import (
    as_bytes,
    as_floats,
    as_words,
    decode_ue8m0_words,
    dequantize_mxfp4,
    encode_ue8m0_words,
    hidden,
    load_e4m3,
    quantize,
    quantize_mxfp4,
)
from xmla.core.lang.offsets import offset_of


@triton.jit
def load_keys(ptr, rows, scale_ptrs, ok, D: tl.constexpr, FORMAT: tl.constexpr):
    """Indexer keys [BLOCK_N, D] as an operand of a product, and their factors [BLOCK_N] f32.

    fp8 and fp8_ue8m0: e4m3 (`load_e4m3`) and its scales. mxfp4: bf16 dequantised exactly (`dequantize_mxfp4`), and
    factors of 1.
    `rows` [BLOCK_N] are byte offsets of the values from `ptr`, `scale_ptrs` point to bytes. Only read where `ok`.
    """
    if FORMAT == "mxfp4":
        packed_ptrs = as_bytes(ptr) + rows[:, None] + tl.arange(0, D // 2)[None, :]
        packed = tl.load(packed_ptrs, mask=ok[:, None], other=0)
        scales = tl.load(scale_ptrs[:, None] + tl.arange(0, D // 32)[None, :], mask=ok[:, None], other=127)
        keys = dequantize_mxfp4(packed, scales)
        factors = tl.full(ok.shape, 1.0, tl.float32)
    else:
        keys = load_e4m3(as_bytes(ptr) + rows[:, None] + tl.arange(0, D)[None, :], ok[:, None])
        if FORMAT == "fp8_ue8m0":
            factors = decode_ue8m0_words(tl.load(as_words(scale_ptrs), mask=ok, other=0))
        else:
            factors = tl.load(as_floats(scale_ptrs), mask=ok, other=0.0)
    return keys, factors


@triton.jit
def load_query(ptrs, mask):
    """Rows of the quantised query, e4m3 (`load_e4m3`) or bf16, 0 where not `mask`; `ptrs` of e4m3 point to bytes."""
    if ptrs.dtype.element_ty == tl.bfloat16:
        return tl.load(ptrs) if mask is None else tl.load(ptrs, mask=mask, other=0.0)
    else:
        return load_e4m3(ptrs, mask)


@triton.jit
def load_pages(table_row, key, mapped, PAGE_SIZE: tl.constexpr):
    """Pages of positions `key` [BLOCK_N], −1 from `mapped` on."""
    return tl.load(table_row + key // PAGE_SIZE, mask=key < mapped, other=-1)


@triton.jit
def load_page_keys(
    cache_ptr, page, key, num_pages, PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """`load_keys` of positions `key` [BLOCK_N] on pages `page`, and which of them are present."""
    ok = (page >= 0) & (page < num_pages)
    first_byte = offset_of(page, PAGE_STRIDE)
    offset = key % PAGE_SIZE
    VALUES: tl.constexpr = D // 2 if FORMAT == "mxfp4" else D
    scale_ptrs = as_bytes(cache_ptr) + first_byte + PAGE_SIZE * VALUES + offset_of(offset, 4, PAGE_SIZE)
    rows = first_byte + offset_of(offset, VALUES, PAGE_SIZE)
    keys, factors = load_keys(cache_ptr, rows, scale_ptrs, ok, D, FORMAT)
    return keys, factors, ok


@triton.constexpr_function
def log2_of(power):
    return power.bit_length() - 1


def _heads_of_lane(x, GROUP: tl.constexpr):
    """x [N, GROUP · BLOCK_I] as BLOCK_I / 4 tensors [N, GROUP, 4, 1]: one for each head that a lane holds of a token.

    Four lanes share a row of a wgmma's result; each holds two adjacent columns of every eight:

        column   0 1   2 3   4 5   6 7   8 9   10 11   …
        lane      0     1     2     3     0      1     …
        head     0 1   0 1   0 1   0 1   2 3    2 3    …   of the lane
    """
    N: tl.constexpr = x.shape[0]
    HEADS: tl.constexpr = x.shape[1] // GROUP // 4
    x = tl.permute(tl.reshape(x, (N, GROUP, HEADS // 2, 4, 2)), (0, 1, 3, 2, 4))
    parts = (tl.reshape(x, (N, GROUP, 4, HEADS)),)
    for halving in tl.static_range(log2_of(HEADS)):
        smaller = ()
        for part in tl.static_range(2**halving):
            pairs = tl.reshape(parts[part], (N, GROUP, 4, 2, HEADS >> (halving + 1)))
            smaller += tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
        parts = smaller
    return parts


heads_of_lane = triton.jit(_heads_of_lane)
gluon_heads_of_lane = gluon.jit(_heads_of_lane)


@triton.jit
def heads_of_tile(GROUP: tl.constexpr, BLOCK_I: tl.constexpr, RUN: tl.constexpr):
    """The token within its group, and its head, of each row of q [GROUP · BLOCK_I].

    A token's heads are neighbours, or with RUN only so many of them, followed by as many of the next token. In a tile
    of mma.sync warps divide adjacent rows: runs keep most heads of a token in one warp.
    """
    row = tl.arange(0, GROUP * BLOCK_I)
    if RUN:
        return row // RUN % GROUP, row // (RUN * GROUP) * RUN + row % RUN
    else:
        return row // BLOCK_I, row % BLOCK_I


@triton.jit
def sum_of_heads(dots, weights, GROUP: tl.constexpr, RUN: tl.constexpr):
    """Σ_i dots_i · weights_i of each token, dots [N, GROUP · BLOCK_I], weights [GROUP · BLOCK_I] → [N, GROUP], f32.

    A tree whose every addition has two summands, so that no tile, version or part has another order. Its levels begin
    with what a lane holds, adjacent heads and runs; then come lanes, and last what warps may divide.
    """
    N: tl.constexpr = dots.shape[0]
    ROWS: tl.constexpr = dots.shape[1]
    weights, dots = tl.broadcast(weights[None, :], dots)
    even, odd = tl.split(tl.reshape(dots, (N, ROWS // 2, 2)))
    of_even, of_odd = tl.split(tl.reshape(weights, (N, ROWS // 2, 2)))
    sums = tl.fma(odd, of_odd, even * of_even)  # of two products the compiler chooses which it rounds
    for level in tl.static_range(log2_of(ROWS // GROUP // RUN)):
        sums = tl.sum(tl.reshape(sums, (N, 2, ROWS >> (level + 2))), axis=1)
    sums = tl.reshape(sums, (N, GROUP, RUN // 8, 2, 2))
    sums = tl.sum(tl.sum(sums, axis=4), axis=3)
    for level in tl.static_range(log2_of(RUN // 8)):
        # A reduction would exchange them among warps twice.
        sums, others = tl.split(tl.reshape(sums, (N, GROUP, RUN >> (level + 4), 2)))
        sums += others
    return tl.reshape(sums, (N, GROUP))


@triton.jit
def head_scores(k, q, weights, factors, GROUP: tl.constexpr, KEYS: tl.constexpr):
    """Indexer logits of GROUP tokens over a tile of keys: factor · Σ_i relu(k · q_i) · weight_i.

    k [BLOCK_N, D] e4m3 or bf16, q [GROUP · BLOCK_I, D] e4m3 or bf16, weights [GROUP · BLOCK_I] f32, both as
    `heads_of_tile` has the heads, factors [BLOCK_N] f32 → [BLOCK_N, GROUP] f32. NaN passes the relu, so that a broken
    key ranks last instead of scoring 0. HOPPER_SUMS fixes the order of the sum, which the Gluon kernels for Hopper
    share: all kernels give the same bits with every Triton version (the order of Triton's own reduction depends on the
    version). If products are not by wgmma, this order would cross lanes; RUN fixes that of mma.sync's.
    """
    HIDE_BYTES: tl.constexpr = KEYS.HIDE_BYTES
    dots = tl.dot(hidden(k, HIDE_BYTES), tl.trans(hidden(q.to(k.dtype), HIDE_BYTES)))  # [BLOCK_N, GROUP · BLOCK_I] f32
    dots = tl.maximum(dots, 0.0, tl.PropagateNan.ALL)
    if KEYS.HOPPER_SUMS:
        weights, dots = tl.broadcast(weights[None, :], dots)
        terms, shares = heads_of_lane(dots, GROUP), heads_of_lane(weights, GROUP)
        lanes = terms[0] * shares[0]
        for own in tl.static_range(1, dots.shape[1] // GROUP // 4):
            lanes = tl.fma(terms[own], shares[own], lanes)  # of two products the compiler chooses which it rounds
        lanes = tl.reshape(lanes, (dots.shape[0], GROUP, 2, 2))
        return tl.sum(tl.sum(lanes, axis=2), axis=2) * factors[:, None]
    elif KEYS.RUN:
        return sum_of_heads(dots, weights, GROUP, KEYS.RUN) * factors[:, None]
    else:
        dots *= weights[None, :]
        by_token = tl.reshape(dots, (dots.shape[0], GROUP, dots.shape[1] // GROUP))
        return tl.sum(by_token, axis=2) * factors[:, None]


@triton.jit
def store_keys(
    cache_ptr, slot, ok, x, FORMAT: tl.constexpr, PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Quantise indexer keys x [N, D] f32 and store them at `slot` [N] where `ok`."""
    D: tl.constexpr = x.shape[1]
    base = offset_of(slot // PAGE_SIZE, PAGE_STRIDE)
    offset = slot % PAGE_SIZE
    cache = as_bytes(cache_ptr)
    if FORMAT == "mxfp4":
        values, scales = quantize_mxfp4(x, MIN_EXPONENT)  # [N, D/2] u8, [N, D/32] u8
        offs_b = tl.arange(0, D // 2)[None, :]
        rows = cache + (base + offset_of(offset, D // 2, PAGE_SIZE))[:, None]
        tl.store(rows + offs_b, values, mask=ok[:, None])
        footer = (cache + base + PAGE_SIZE * (D // 2) + offset_of(offset, 4, PAGE_SIZE))[:, None]
        for unused in tl.static_range(D // 32, 4):
            tl.store(footer + unused, tl.full([x.shape[0], 1], 127, tl.uint8), mask=ok[:, None])
        tl.store(footer + tl.arange(0, D // 32)[None, :], scales, mask=ok[:, None])
    else:
        values, scales = quantize(x, 1, MIN_EXPONENT)  # [N, D] u8, [N] f32
        offs_d = tl.arange(0, D)[None, :]
        rows = cache + (base + offset_of(offset, D, PAGE_SIZE))[:, None]
        tl.store(rows + offs_d, values, mask=ok[:, None])
        footer = cache + base + PAGE_SIZE * D + offset_of(offset, 4, PAGE_SIZE)
        if FORMAT == "fp8_ue8m0":
            tl.store(as_words(footer), encode_ue8m0_words(scales), mask=ok)
        else:
            tl.store(as_floats(footer), scales, mask=ok)
