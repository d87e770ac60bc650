"""The derivative of compressed rows. In a call's order:

differentiate_entries_kernel  a token: of the entry that it completes, its window's softmax, pooled dims and gradient
differentiate_tokens_kernel   some tokens and dims: gradients of kv and score, each of which stands in one window
sum_places_kernel             a place in the groups and some dims: the gradient of ape
sum_weights_kernel            some dims: the gradient of the norm's weights
"""

import triton
import triton.language as tl

from xmla.core.lang.numbers import LOG2E
from xmla.core.lang.offsets import offset_of
from xmla.core.ops.cache.compress_kv.kernels import rotate
from xmla.core.ops.training.compress_rows.kernels import completes, pool_window, scale_of


@triton.jit
def differentiate_entries_kernel(
    kv_ptr,  # [N, C·D]
    score_ptr,  # [N, C·D]
    ape_ptr,  # [r, C·D] f32
    positions_ptr,  # [N] i32
    drows_ptr,  # [N, D] f32
    norm_weight_ptr,  # [D] if C.HAS_NORM
    cos_sin_ptr,  # [S, E] if C.E
    num_angles,  # S if C.HAS_ANGLES
    lse_ptr,  # [N, D] f32: log of the softmax's denominator; like the next two, of tokens that complete an entry
    pooled_ptr,  # [N, D] f32
    dpooled_ptr,  # [N, D] f32
    dweights_ptr,  # [N, D] f32 if C.HAS_NORM: a token's part of dnorm_weight
    C: tl.constexpr,  # EntryDerivative
):
    D: tl.constexpr = C.D
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, D)
    position = tl.load(positions_ptr + token)
    row = offset_of(token, D) + offs_d
    dweight = tl.zeros([D], tl.float32)
    if completes(position, num_angles, C):
        pooled, lse = pool_window(kv_ptr, score_ptr, ape_ptr, positions_ptr, token, position, C)
        dpooled = tl.load(drows_ptr + offset_of(token, C.DROW_STRIDE) + offs_d)
        if C.E:
            angle = cos_sin_ptr + offset_of(position - (C.RATIO - 1), C.ANGLE_STRIDE)
            dpooled = rotate(dpooled, angle, C.D, C.E, True)
        if C.HAS_NORM:
            scale = scale_of(pooled, C)
            unit = pooled * scale
            dweight = dpooled * unit
            dpooled *= tl.load(norm_weight_ptr + offs_d).to(tl.float32)
            dpooled = scale * (dpooled - unit * (tl.sum(dpooled * unit, 0) / C.D))
        tl.store(lse_ptr + row, lse)
        tl.store(pooled_ptr + row, pooled)
        tl.store(dpooled_ptr + row, dpooled)
    if C.HAS_NORM:
        tl.store(dweights_ptr + row, dweight)


@triton.jit
def differentiate(
    kv_ptr, score_ptr, ape_ptr, positions_ptr, lse_ptr, pooled_ptr, dpooled_ptr, token, position, ok, first_dim,
    num_tokens, num_angles, C: tl.constexpr,
):  # fmt: skip
    """Gradients of kv and score of tokens [BLOCK_T] where `ok`, in dims [BLOCK_D] of one series, in float32."""
    series = first_dim // C.D
    place = position % C.RATIO
    ahead = C.RATIO - 1 - place + (C.SERIES - 1 - series) * C.RATIO  # to the token that completes the entry
    last = token + ahead
    ok &= (position >= 0) & (last < num_tokens)
    end = tl.load(positions_ptr + last, mask=ok, other=-1)
    ok &= (end - position == ahead) & completes(end, num_angles, C)
    offs_c = first_dim + tl.arange(0, C.BLOCK_D)[None, :]
    mask = ok[:, None]
    kv = tl.load(kv_ptr + offset_of(token[:, None], C.KV_STRIDE) + offs_c, mask=mask, other=0.0).to(tl.float32)
    score = tl.load(score_ptr + offset_of(token[:, None], C.SCORE_STRIDE) + offs_c, mask=mask, other=0.0).to(tl.float32)
    score += tl.load(ape_ptr + offset_of(place[:, None], C.APE_STRIDE, C.RATIO) + offs_c, mask=mask, other=0.0)
    row = offset_of(last[:, None], C.D) + offs_c % C.D
    weight = tl.exp2((score - tl.load(lse_ptr + row, mask=mask, other=0.0)) * LOG2E)
    dkv = tl.where(mask, weight * tl.load(dpooled_ptr + row, mask=mask, other=0.0), 0.0)
    return dkv, tl.where(mask, dkv * (kv - tl.load(pooled_ptr + row, mask=mask, other=0.0)), 0.0)


@triton.jit
def differentiate_tokens_kernel(
    kv_ptr,  # [N, C·D]
    score_ptr,  # [N, C·D]
    ape_ptr,  # [r, C·D] f32
    positions_ptr,  # [N] i32
    lse_ptr,  # [N, D] f32
    pooled_ptr,  # [N, D] f32
    dpooled_ptr,  # [N, D] f32
    num_tokens,  # N
    num_angles,  # S if C.HAS_ANGLES
    dkv_ptr,  # [N, C·D]
    dscore_ptr,  # [N, C·D]
    C: tl.constexpr,  # TokenDerivative
):
    WIDTH: tl.constexpr = C.SERIES * C.D
    PARTS: tl.constexpr = WIDTH // C.BLOCK_D
    token = offset_of(tl.program_id(0) // PARTS, C.BLOCK_T) + tl.arange(0, C.BLOCK_T)
    first_dim = tl.program_id(0) % PARTS * C.BLOCK_D
    ok = token < num_tokens
    position = tl.load(positions_ptr + token, mask=ok, other=-1)
    dkv, dscore = differentiate(
        kv_ptr, score_ptr, ape_ptr, positions_ptr, lse_ptr, pooled_ptr, dpooled_ptr, token, position, ok, first_dim,
        num_tokens, num_angles, C,
    )  # fmt: skip
    at = offset_of(token[:, None], WIDTH) + first_dim + tl.arange(0, C.BLOCK_D)[None, :]
    tl.store(dkv_ptr + at, dkv.to(dkv_ptr.dtype.element_ty), mask=ok[:, None])
    tl.store(dscore_ptr + at, dscore.to(dscore_ptr.dtype.element_ty), mask=ok[:, None])


@triton.jit
def sum_places_kernel(
    kv_ptr,  # [N, C·D]
    score_ptr,  # [N, C·D]
    ape_ptr,  # [r, C·D] f32
    positions_ptr,  # [N] i32
    lse_ptr,  # [N, D] f32
    pooled_ptr,  # [N, D] f32
    dpooled_ptr,  # [N, D] f32
    num_tokens,  # N
    num_angles,  # S if C.HAS_ANGLES
    dape_ptr,  # [r, C·D] f32
    C: tl.constexpr,  # TokenDerivative
):
    WIDTH: tl.constexpr = C.SERIES * C.D
    BLOCK_D: tl.constexpr = C.BLOCK_D
    PARTS: tl.constexpr = WIDTH // BLOCK_D
    place = tl.program_id(0) // PARTS
    first_dim = tl.program_id(0) % PARTS * C.BLOCK_D
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_tokens, C.BLOCK_T):
        token = tl.cast(first, tl.int64) + tl.arange(0, C.BLOCK_T)
        position = tl.load(positions_ptr + token, mask=token < num_tokens, other=-1)
        ok = (position >= 0) & (position % C.RATIO == place)
        _, dscore = differentiate(
            kv_ptr, score_ptr, ape_ptr, positions_ptr, lse_ptr, pooled_ptr, dpooled_ptr, token, position, ok,
            first_dim, num_tokens, num_angles, C,
        )  # fmt: skip
        total += tl.sum(dscore, 0)
    tl.store(dape_ptr + offset_of(place, WIDTH) + first_dim + tl.arange(0, C.BLOCK_D), total)


@triton.jit
def sum_weights_kernel(
    dweights_ptr,  # [N, D] f32
    num_tokens,  # N
    dnorm_weight_ptr,  # [D]
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_tokens, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        ptrs = dweights_ptr + offset_of(token[:, None], D) + offs_d[None, :]
        total += tl.sum(tl.load(ptrs, mask=(token < num_tokens)[:, None], other=0.0), 0)
    tl.store(dnorm_weight_ptr + offs_d, total.to(dnorm_weight_ptr.dtype.element_ty))
