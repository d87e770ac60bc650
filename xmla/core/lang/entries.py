"""Entries of the latent caches inside kernels: read and written according to their layout.

An entry is two tiles: the dims that attention uses as values, [N, LANES], and the roped dims that only keys have,
[N, TAIL_LANES], in layouts that have them. `LAYOUT` is a `xmla.core.formats.mla.MlaLayout`.
"""

import triton
import triton.language as tl

from xmla.core.lang.numbers import (
    as_bytes,
    as_floats,
    decode_e4m3,
    decode_ue8m0,
    encode_e4m3,
    encode_ue8m0,
    quantize,
    quantize_e2m1,
    quantize_nvfp4,
    unpack_e2m1,
)
from xmla.core.lang.offsets import offset_of

LANES = tl.constexpr(512)
TAIL_LANES = tl.constexpr(64)


@triton.jit
def entry_offsets(slot, LAYOUT: tl.constexpr, PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Offsets of entries at `slot` [N] and of their scales: bytes, or elements of plain rows."""
    page = offset_of(slot // PAGE_SIZE, PAGE_STRIDE)
    offset = slot % PAGE_SIZE
    data = page + offset_of(offset, LAYOUT.data, PAGE_SIZE)
    if LAYOUT.footer:
        return data, page + PAGE_SIZE * LAYOUT.data + offset_of(offset, LAYOUT.footer, PAGE_SIZE)
    return data, data + LAYOUT.scale_offset


@triton.jit
def scale_pointers(cache, scales, LAYOUT: tl.constexpr):
    """Pointers to the bytes of entries' scales, [N, LANES / tile], and which of these scales the layout has, [1, …]."""
    offs_g = tl.arange(0, LANES // LAYOUT.tile)[None, :]
    place = offs_g
    if LAYOUT.interleaved:
        place = 8 * (offs_g % 4) + offs_g // 4
    return cache + scales[:, None] + place * LAYOUT.scale_bytes, offs_g < LAYOUT.scales


@triton.jit
def load_scales(cache, scales, ok, LAYOUT: tl.constexpr):
    """Scales of entries where `ok`, [N, LANES / tile] f32; 0 elsewhere."""
    ptrs, present = scale_pointers(cache, scales, LAYOUT)
    mask = ok[:, None]
    if LAYOUT.quantized < LANES:
        mask = ok[:, None] & present
    if LAYOUT.scale == "float32":
        return tl.load(as_floats(ptrs), mask=mask, other=0.0)
    elif LAYOUT.scale == "ue8m0":
        return decode_ue8m0(tl.load(ptrs, mask=mask, other=0))
    elif LAYOUT.outer_scale:
        outer = cache + scales[:, None] + (LAYOUT.outer_scale - LAYOUT.scale_offset)
        return decode_e4m3(tl.load(ptrs, mask=mask, other=0)) * tl.load(as_floats(outer), mask=ok[:, None], other=0.0)
    else:
        return decode_e4m3(tl.load(ptrs, mask=mask, other=0))


@triton.jit
def load_quantized(cache, data, scales, ok, LAYOUT: tl.constexpr):
    """Quantised dims of entries where `ok`, times their scales: [N, LANES / tile, tile] f32, 0 past the last."""
    scale = load_scales(cache, scales, ok, LAYOUT)
    mask = ok[:, None]
    if LAYOUT.values == "e2m1":
        offs_b = tl.arange(0, LANES // 2)[None, :]
        if LAYOUT.quantized < LANES:
            mask = ok[:, None] & (offs_b < LAYOUT.quantized // 2)
        values = unpack_e2m1(tl.load(cache + data[:, None] + offs_b, mask=mask, other=0))
    else:
        offs_d = tl.arange(0, LANES)[None, :]
        if LAYOUT.quantized < LANES:
            mask = ok[:, None] & (offs_d < LAYOUT.quantized)
        values = decode_e4m3(tl.load(cache + data[:, None] + offs_d, mask=mask, other=0))
    return tl.reshape(values, (ok.shape[0], LANES // LAYOUT.tile, LAYOUT.tile)) * scale[:, :, None]


@triton.jit
def load_entries(cache_ptr, data, scales, ok, dtype: tl.constexpr, LAYOUT: tl.constexpr):
    """Entries at `entry_offsets` where `ok`, else zeros, in `dtype`: [N, LANES] and [N, TAIL_LANES]."""
    offs_l = tl.arange(0, LANES)[None, :]
    offs_e = tl.arange(0, TAIL_LANES)[None, :]
    mask = ok[:, None]
    tail = tl.zeros([ok.shape[0], TAIL_LANES], dtype)
    if LAYOUT.packed:
        cache = as_bytes(cache_ptr)
        tiled = load_quantized(cache, data, scales, ok, LAYOUT).to(dtype)
        rope = cache + data[:, None] + LAYOUT.rope_offset
        if LAYOUT.rope_values == "bfloat16":
            halves = tl.load(rope.to(tl.pointer_type(tl.bfloat16), bitcast=True) + offs_e, mask=mask, other=0.0)
            if LAYOUT.rope_in_value:  # they take the place of the last tiles
                GROUP: tl.constexpr = LANES // LAYOUT.rope
                tiled = tl.reshape(tiled, (ok.shape[0], GROUP, LAYOUT.rope))
                is_rope = tl.arange(0, GROUP)[None, :, None] == GROUP - 1
                tiled = tl.where(is_rope, halves.to(dtype)[:, None, :], tiled)
            else:
                tail = halves.to(dtype)
        elif LAYOUT.rope_values == "e4m3":
            dims = decode_e4m3(tl.load(rope + offs_e, mask=mask, other=0))
            if LAYOUT.rope_scale:
                dims *= tl.load(as_floats(cache + data[:, None] + LAYOUT.rope_scale), mask=mask, other=0.0)
            tail = dims.to(dtype)
        value = tl.reshape(tiled, (ok.shape[0], LANES))
    else:
        value = tl.load(cache_ptr + data[:, None] + offs_l, mask=mask, other=0.0).to(dtype)
        if LAYOUT.tail:
            tail = tl.load(cache_ptr + data[:, None] + LAYOUT.rope_offset + offs_e, mask=mask, other=0.0).to(dtype)
    return value, tail


@triton.jit
def entry_scale(x, GREATEST: tl.constexpr):
    """Scales [N, 1] of whole rows of float32 [N, dims]: `formats.mla.entry_scale`."""
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1, keep_dims=True)
    return tl.maximum(tl.math.div_rn(tl.minimum(amax, 3.4028234663852886e38), GREATEST), 2.0**-100)


@triton.jit
def store_quantized(cache, data, scales, ok, x, LAYOUT: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Quantise the first dims of x [N, LANES] f32, as many as have scales, and store both where `ok`."""
    tiled = tl.reshape(x, (x.shape[0], LANES // LAYOUT.tile, LAYOUT.tile))
    ptrs, present = scale_pointers(cache, scales, LAYOUT)
    if LAYOUT.values == "e2m1":
        if LAYOUT.scale == "ue8m0":
            packed, scale = quantize_e2m1(tiled, MIN_EXPONENT)
            stored_scale = encode_ue8m0(scale)
        elif LAYOUT.outer_scale:
            outer = entry_scale(x, 6.0 * 448.0)
            tl.store(as_floats(cache + data[:, None] + LAYOUT.outer_scale), outer, mask=ok[:, None])
            packed, stored_scale = quantize_nvfp4(tl.math.div_rn(tiled, outer[:, :, None]), MIN_EXPONENT, False)
        else:
            packed, stored_scale = quantize_nvfp4(tiled, MIN_EXPONENT, LAYOUT.scale_up)
        offs_b = tl.arange(0, LANES // 2)[None, :]
        tl.store(cache + data[:, None] + offs_b, packed, mask=ok[:, None] & (offs_b < LAYOUT.quantized // 2))
        tl.store(ptrs, stored_scale, mask=ok[:, None] & present)
    else:
        values, scale = quantize(tiled, 2, MIN_EXPONENT)
        offs_d = tl.arange(0, LANES)[None, :]
        stored = tl.reshape(values, (x.shape[0], LANES))
        tl.store(cache + data[:, None] + offs_d, stored, mask=ok[:, None] & (offs_d < LAYOUT.quantized))
        if LAYOUT.scale == "float32":
            tl.store(as_floats(ptrs), scale, mask=ok[:, None] & present)
        else:
            tl.store(ptrs, encode_ue8m0(scale), mask=ok[:, None] & present)


@triton.jit
def store_entries(
    cache_ptr, slot, ok, value, tail, LAYOUT: tl.constexpr, PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Store entries at `slot` [N] where `ok`: float32 tiles [N, LANES] and [N, TAIL_LANES], quantised to LAYOUT.

    Rounding is to nearest even, saturating. Scales are at least 2**MIN_EXPONENT, and powers of two unless they are e4m3
    (`quantize_nvfp4`); NaN is ignored when a scale is chosen.
    """
    data, scales = entry_offsets(slot, LAYOUT, PAGE_STRIDE, PAGE_SIZE)
    offs_l = tl.arange(0, LANES)[None, :]
    offs_e = tl.arange(0, TAIL_LANES)[None, :]
    mask = ok[:, None]
    if LAYOUT.packed:
        cache = as_bytes(cache_ptr)
        store_quantized(cache, data, scales, ok, value, LAYOUT, MIN_EXPONENT)
        if LAYOUT.footer > LAYOUT.scales:
            offs_p = LAYOUT.scales + tl.arange(0, LAYOUT.footer - LAYOUT.scales)[None, :]
            tl.store(cache + scales[:, None] + offs_p, tl.zeros([slot.shape[0], 1], tl.uint8), mask=mask)
        rope = cache + data[:, None] + LAYOUT.rope_offset
        if LAYOUT.rope_values == "bfloat16":
            halves = rope.to(tl.pointer_type(tl.bfloat16), bitcast=True)
            if LAYOUT.rope_in_value:
                is_rope = offs_l >= LAYOUT.latent
                tl.store(halves + (offs_l - LAYOUT.latent), value.to(tl.bfloat16), mask=mask & is_rope)
            else:
                tl.store(halves + offs_e, tail.to(tl.bfloat16), mask=mask)
        elif LAYOUT.rope_values == "e4m3":
            if LAYOUT.rope_scale:
                scale = entry_scale(tail, 448.0)
                tl.store(as_floats(cache + data[:, None] + LAYOUT.rope_scale), scale, mask=mask)
                tail = tl.math.div_rn(tail, scale)
            kept = tl.minimum(tl.maximum(tail, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
            tl.store(rope + offs_e, encode_e4m3(kept), mask=mask)
    else:
        dtype: tl.constexpr = cache_ptr.dtype.element_ty
        tl.store(cache_ptr + data[:, None] + offs_l, value.to(dtype), mask=mask)
        if LAYOUT.tail:
            tl.store(cache_ptr + data[:, None] + LAYOUT.rope_offset + offs_e, tail.to(dtype), mask=mask)
