"""Compressed rows: a program a token, of which those that complete an entry pool its window."""

import triton
import triton.language as tl

from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.offsets import offset_of
from xmla.core.ops.cache.compress_kv.kernels import rotate


@triton.jit
def completes(position, num_angles, C: tl.constexpr):
    """Whether tokens at these positions complete an entry that has an angle, or needs none."""
    complete = (position >= 0) & (position % C.RATIO == C.RATIO - 1)
    if C.HAS_ANGLES:
        complete &= position - (C.RATIO - 1) < num_angles
    return complete


@triton.jit
def pool_window(kv_ptr, score_ptr, ape_ptr, positions_ptr, token, position, C: tl.constexpr):
    """Σ softmax(score) · kv over the window of the entry that a token completes, and log Σ exp(score): [D] each.

    Of a token alone in its window they are its kv and its score to the bit, so that its score's gradient is 0: no
    product is subtracted from, which a fused multiply-add would leave unrounded, and the quotient is rounded.
    """
    D: tl.constexpr = C.D
    WINDOW: tl.constexpr = C.WINDOW
    BLOCK_W: tl.constexpr = C.BLOCK_W
    offs_d = tl.arange(0, D)
    maximum = tl.full([D], float("-inf"), tl.float32)
    denominator = tl.zeros([D], tl.float32)
    pooled = tl.zeros([D], tl.float32)
    for start in tl.range(0, WINDOW, BLOCK_W):
        offs_w = start + tl.arange(0, BLOCK_W)
        before = WINDOW - 1 - offs_w  # tokens before the last of the window
        ok = (offs_w < WINDOW) & (before <= position) & (before <= token)  # [BLOCK_W]
        row = token - before
        ok &= tl.load(positions_ptr + row, mask=ok, other=-1) == position - before
        dims = (offs_w // C.RATIO * C.D)[:, None] + offs_d[None, :]  # of two series the earlier group gives the first
        kv_row, score_row = offset_of(row[:, None], C.KV_STRIDE), offset_of(row[:, None], C.SCORE_STRIDE)
        ape_row = offset_of((offs_w % C.RATIO)[:, None], C.APE_STRIDE, C.RATIO)
        mask = ok[:, None]
        kv = tl.load(kv_ptr + kv_row + dims, mask=mask, other=0.0).to(tl.float32)
        score = tl.load(score_ptr + score_row + dims, mask=mask, other=0.0).to(tl.float32)
        score += tl.load(ape_ptr + ape_row + dims, mask=mask, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2((score - base[None, :]) * LOG2E)
        rescale = tl.exp2((maximum - base) * LOG2E)
        denominator = denominator * rescale + tl.sum(weight, 0)
        pooled = pooled * rescale + tl.sum(weight * kv, 0)
        maximum = new_maximum
    return tl.math.div_rn(pooled, denominator), maximum + tl.log(denominator)


@triton.jit
def scale_of(pooled, C: tl.constexpr):
    """What norming multiplies a pooled window by, beside the weights."""
    return tl.rsqrt(tl.sum(pooled * pooled, 0) / C.D + C.EPS)


@triton.jit
def compress_rows_kernel(
    kv_ptr,  # [N, C·D]
    score_ptr,  # [N, C·D]
    ape_ptr,  # [r, C·D] f32
    positions_ptr,  # [N] i32
    norm_weight_ptr,  # [D] if C.HAS_NORM
    cos_sin_ptr,  # [S, E] if C.E
    num_angles,  # S if C.HAS_ANGLES
    rows_ptr,  # [N, D] f32
    C: tl.constexpr,  # Compressor
):
    D: tl.constexpr = C.D
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, D)
    position = tl.load(positions_ptr + token)
    row = tl.zeros([D], tl.float32)
    if completes(position, num_angles, C):
        row, _ = pool_window(kv_ptr, score_ptr, ape_ptr, positions_ptr, token, position, C)
        if C.HAS_NORM:
            row = row * scale_of(row, C) * tl.load(norm_weight_ptr + offs_d).to(tl.float32)
        if C.E:
            row = rotate(row, cos_sin_ptr + offset_of(position - (C.RATIO - 1), C.ANGLE_STRIDE), C.D, C.E, False)
    tl.store(rows_ptr + offset_of(token, C.D) + offs_d, row)
