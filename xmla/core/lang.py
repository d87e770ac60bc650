"""Triton helpers shared by the kernels of several ops."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
E4M3_GREATEST_BITS = tl.constexpr(0x43E00000)  # 448.0
E2M1_GREATEST_BITS = tl.constexpr(0x40C00000)  # 6.0


@triton.jit
def as_bytes(ptr):
    """A pointer to raw bytes, whatever one-byte dtype the array has."""
    return ptr.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def as_floats(ptr):
    """A pointer to float32 from a 4-byte aligned pointer to bytes."""
    return ptr.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def as_e4m3(ptr):
    """A pointer to e4m3 from a pointer to bytes."""
    return ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)


@triton.jit
def power_of_two_exponent(amax, GREATEST_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Smallest integer e ≥ MIN_EXPONENT with greatest · 2**e ≥ amax: the difference of their bits over 2**23, up."""
    return tl.maximum((amax.to(tl.int32, bitcast=True) - GREATEST_BITS + 0x7FFFFF) >> 23, MIN_EXPONENT)


@triton.jit
def power_of_two(exponent):
    """2**exponent in float32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize(x, axis: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """e4m3 values and float32 power-of-two scales of float32 `x`, one scale over `axis` (the last).

    Multiplying by a power of two is exact, so the only rounding is the cast's. NaN stays NaN and does not count.
    """
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=axis)
    exponent = power_of_two_exponent(amax, E4M3_GREATEST_BITS, MIN_EXPONENT)
    scaled = x * tl.expand_dims(power_of_two(-exponent), axis)
    scaled = tl.minimum(tl.maximum(scaled, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv), power_of_two(exponent)


@triton.jit
def page_base(page, PAGE_STRIDE: tl.constexpr):
    """Offset of a page's first element, in 64 bits: pools pass 2**31 bytes."""
    return page.to(tl.int64) * PAGE_STRIDE


@triton.jit
def load_page_keys(
    cache_ptr, table_row, key, mapped, num_pages, PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr
):
    """Indexer keys [BLOCK_N, D] e4m3 at positions `key` below `mapped`, scales [BLOCK_N] f32, and which are there."""
    page = tl.load(table_row + key // PAGE_SIZE, mask=key < mapped, other=-1)
    ok = (page >= 0) & (page < num_pages)
    first_byte = page_base(page, PAGE_STRIDE)
    offset = key % PAGE_SIZE
    key_row = first_byte + offset * D
    keys = tl.load(as_e4m3(cache_ptr) + key_row[:, None] + tl.arange(0, D)[None, :], mask=ok[:, None], other=0.0)
    scale_ptrs = as_floats(as_bytes(cache_ptr) + first_byte + PAGE_SIZE * D + offset * 4)
    return keys, tl.load(scale_ptrs, mask=ok, other=0.0), ok


@triton.jit
def head_scores(k, q, weights, key_scales, GROUP: tl.constexpr):
    """Indexer logits of GROUP tokens over a tile of keys: key_scale · Σ_i relu(k · q_i) · weight_i.

    k [BLOCK_N, D] e4m3, q [GROUP · BLOCK_I, D] e4m3, weights [GROUP · BLOCK_I] f32, key_scales [BLOCK_N] f32
    → [BLOCK_N, GROUP] f32. A NaN survives the relu, so that a broken key ranks last instead of scoring 0.
    """
    dots = tl.dot(k, tl.trans(q))  # [BLOCK_N, GROUP · BLOCK_I] f32
    dots = tl.maximum(dots, 0.0, tl.PropagateNan.ALL) * weights[None, :]
    by_token = tl.reshape(dots, (dots.shape[0], GROUP, dots.shape[1] // GROUP))
    return tl.sum(by_token, axis=2) * key_scales[:, None]
