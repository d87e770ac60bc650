"""Triton helpers shared by the kernels of several ops."""

import triton
import triton.language as tl

from xmla.core.offsets import offset_of

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
def as_words(ptr):
    """A pointer to 4 raw bytes as int32 from a 4-byte aligned pointer."""
    return ptr.to(tl.pointer_type(tl.int32), bitcast=True)


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
def decode_e2m1(code):
    """float16 values of 4-bit codes: the three bits of the magnitude become a float16's lowest exponents."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def encode_e2m1(x):
    """4-bit codes of float32 `x` within ±6, to nearest, ties to the even code; −0 keeps its sign."""
    a = tl.abs(x)
    code = tl.where(a > 0.25, 1, 0) + tl.where(a >= 0.75, 1, 0) + tl.where(a > 1.25, 1, 0) + tl.where(a >= 1.75, 1, 0)
    code += tl.where(a > 2.5, 1, 0) + tl.where(a >= 3.5, 1, 0) + tl.where(a > 5.0, 1, 0)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def unpack_e2m1(raw):
    """float32 [N, 2B] of bytes [N, B], each two e2m1 values with the first in the low nibble."""
    code = raw.to(tl.int32)
    return tl.reshape(tl.join(decode_e2m1(code), decode_e2m1(code >> 4)), (raw.shape[0], raw.shape[1] * 2)).to(
        tl.float32
    )


@triton.jit
def decode_ue8m0(byte):
    """float32 scales of UE8M0 bytes: 0 is 2**-127, below the normal numbers, and 255 is NaN."""
    exponent = byte.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_ue8m0(scale):
    """UE8M0 bytes of float32 scales that are normal powers of two, or NaN: the exponent's bits."""
    return ((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)


@triton.jit
def pack_e2m1(scaled, whole):
    """Bytes [N, G · TILE / 2] of two e2m1 values each, of float32 [N, G, TILE] clamped to ±6; 6 where not `whole`."""
    code = encode_e2m1(tl.where(whole, tl.minimum(tl.maximum(scaled, -6.0), 6.0), 6.0))
    low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] * code.shape[2] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def quantize_e2m1(tiled, MIN_EXPONENT: tl.constexpr):
    """e2m1 bytes (`pack_e2m1`) and power-of-two scales [N, G] f32 of float32 [N, G, TILE].

    e2m1 has no NaN: it makes its tile's scale NaN, and is itself stored as 6, as the conversion instruction has it.
    """
    whole = tiled == tiled
    amax = tl.max(tl.where(whole, tl.abs(tiled), 0.0), axis=2)
    exponent = power_of_two_exponent(amax, E2M1_GREATEST_BITS, MIN_EXPONENT)
    scale = tl.where(tl.min(tl.where(whole, 1, 0), axis=2) == 0, float("nan"), power_of_two(exponent))
    return pack_e2m1(tiled * power_of_two(-exponent)[:, :, None], whole), scale


@triton.jit
def quantize_nvfp4(tiled, MIN_EXPONENT: tl.constexpr, UP: tl.constexpr):
    """e2m1 bytes (`pack_e2m1`) and bytes [N, G] of e4m3 scales of float32 [N, G, TILE]; `layout.quantize_nvfp4`.

    Quotients are rounded to nearest: the default division is not, and misses ties.
    """
    whole = tiled == tiled
    amax = tl.max(tl.where(whole, tl.abs(tiled), 0.0), axis=2)
    exact = tl.minimum(tl.maximum(tl.math.div_rn(amax, 6.0), 2.0**MIN_EXPONENT), 448.0)
    stored = exact.to(tl.float8e4nv)
    if UP:  # the bytes of positive e4m3 values are in their order
        below = tl.where(stored.to(tl.float32) < exact, 1, 0)
        stored = (stored.to(tl.uint8, bitcast=True) + below).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    quotient = tl.math.div_rn(tiled, stored.to(tl.float32)[:, :, None])
    scales = tl.where(tl.min(tl.where(whole, 1, 0), axis=2) == 0, 0x7F, stored.to(tl.uint8, bitcast=True))
    return pack_e2m1(quotient, whole), scales.to(tl.uint8)


@triton.jit
def quantize_mxfp4(x, MIN_EXPONENT: tl.constexpr):
    """Packed e2m1 [N, D/2] u8 and UE8M0 [N, D/32] u8 of float32 `x` [N, D]; rules in `layout.quantize_mxfp4`."""
    packed, scale = quantize_e2m1(tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32)), MIN_EXPONENT)
    return packed, encode_ue8m0(scale)


@triton.jit
def dequantize_mxfp4(packed, scales):
    """bf16 [N, D] of packed e2m1 [N, D/2] u8 and UE8M0 [N, D/32] u8, exactly: two bits and any exponent fit."""
    values = tl.reshape(unpack_e2m1(packed), (packed.shape[0], scales.shape[1], 32))
    scaled = (values * decode_ue8m0(scales)[:, :, None]).to(tl.bfloat16)
    return tl.reshape(scaled, (packed.shape[0], packed.shape[1] * 2))


@triton.jit
def request_of(request_ids_ptr, num_requests, next_n, HAS_REQUEST_IDS: tl.constexpr):
    """The request of the token that is this program's, −1 if there is none."""
    request = tl.program_id(0) // next_n
    if HAS_REQUEST_IDS:
        request = tl.load(request_ids_ptr + tl.program_id(0))
    return tl.where((request >= 0) & (request < num_requests), request, -1)


@triton.jit
def load_keys(ptr, rows, scale_ptrs, ok, D: tl.constexpr, MXFP4: tl.constexpr):
    """Indexer keys [BLOCK_N, D] as a product takes them and their factors [BLOCK_N] f32.

    fp8: e4m3 and its scales. mxfp4: bf16 with the scales in it, exact as `dequantize_mxfp4` is, and factors of 1.
    `rows` [BLOCK_N] are byte offsets of the values from `ptr`, `scale_ptrs` point to bytes. Read where `ok` alone.
    """
    if MXFP4:
        packed_ptrs = as_bytes(ptr) + rows[:, None] + tl.arange(0, D // 2)[None, :]
        packed = tl.load(packed_ptrs, mask=ok[:, None], other=0)
        scales = tl.load(scale_ptrs[:, None] + tl.arange(0, D // 32)[None, :], mask=ok[:, None], other=127)
        keys = dequantize_mxfp4(packed, scales)
        factors = tl.full(ok.shape, 1.0, tl.float32)
    else:
        keys = tl.load(as_e4m3(ptr) + rows[:, None] + tl.arange(0, D)[None, :], mask=ok[:, None], other=0.0)
        factors = tl.load(as_floats(scale_ptrs), mask=ok, other=0.0)
    return keys, factors


@triton.jit
def load_pages(table_row, key, mapped, PAGE_SIZE: tl.constexpr):
    """Pages of positions `key` [BLOCK_N], −1 from `mapped` on."""
    return tl.load(table_row + key // PAGE_SIZE, mask=key < mapped, other=-1)


@triton.jit
def load_page_keys(
    cache_ptr, page, key, num_pages, PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr,
    MXFP4: tl.constexpr,
):  # fmt: skip
    """`load_keys` of positions `key` [BLOCK_N] on pages `page`, and which of them are there."""
    ok = (page >= 0) & (page < num_pages)
    first_byte = offset_of(page, PAGE_STRIDE)
    offset = key % PAGE_SIZE
    VALUES: tl.constexpr = D // 2 if MXFP4 else D
    scale_ptrs = as_bytes(cache_ptr) + first_byte + PAGE_SIZE * VALUES + offset_of(offset, 4, PAGE_SIZE)
    rows = first_byte + offset_of(offset, VALUES, PAGE_SIZE)
    keys, factors = load_keys(cache_ptr, rows, scale_ptrs, ok, D, MXFP4)
    return keys, factors, ok


@triton.constexpr_function
def log2_of(power):
    return power.bit_length() - 1


@triton.jit
def by_lane(x, GROUP: tl.constexpr):
    """[N, GROUP · BLOCK_I] as [N, GROUP, 4] for each of BLOCK_I / 4 heads: those that one lane of four has.

    A product's rows lie in registers so: the lanes of a row have two neighbouring columns of every eight.
    """
    N: tl.constexpr = x.shape[0]
    OWN: tl.constexpr = x.shape[1] // GROUP // 4
    x = tl.permute(tl.reshape(x, (N, GROUP, OWN // 2, 4, 2)), (0, 1, 3, 2, 4))
    parts = (tl.reshape(x, (N, GROUP, 4, OWN)),)
    for halving in tl.static_range(log2_of(OWN)):
        smaller = ()
        for part in tl.static_range(2**halving):
            pairs = tl.reshape(parts[part], (N, GROUP, 4, 2, OWN >> (halving + 1)))
            smaller += tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
        parts = smaller
    return parts


@triton.jit
def head_scores(k, q, weights, factors, GROUP: tl.constexpr, HOPPER_SUMS: tl.constexpr):
    """Indexer logits of GROUP tokens over a tile of keys: factor · Σ_i relu(k · q_i) · weight_i.

    k [BLOCK_N, D] e4m3 or bf16, q [GROUP · BLOCK_I, D] e4m3 or bf16, weights [GROUP · BLOCK_I] f32, factors [BLOCK_N]
    f32 → [BLOCK_N, GROUP] f32. A NaN survives the relu, so that a broken key ranks last instead of scoring 0.
    HOPPER_SUMS writes out the order of the sum, which Hopper's Gluon kernels share: all give the same bits, with any
    Triton, whose own order depends on its version. Where products are not wgmma's, it would cross lanes.
    """
    dots = tl.dot(k, tl.trans(q.to(k.dtype)))  # [BLOCK_N, GROUP · BLOCK_I] f32
    dots = tl.maximum(dots, 0.0, tl.PropagateNan.ALL)
    if HOPPER_SUMS:
        weights, dots = tl.broadcast(weights[None, :], dots)
        terms, shares = by_lane(dots, GROUP), by_lane(weights, GROUP)
        lanes = terms[0] * shares[0]
        for own in tl.static_range(1, dots.shape[1] // GROUP // 4):
            lanes = tl.fma(terms[own], shares[own], lanes)  # of two products the compiler chooses which it rounds
        lanes = tl.reshape(lanes, (dots.shape[0], GROUP, 2, 2))
        return tl.sum(tl.sum(lanes, axis=2), axis=2) * factors[:, None]
    else:
        dots *= weights[None, :]
        by_token = tl.reshape(dots, (dots.shape[0], GROUP, dots.shape[1] // GROUP))
        return tl.sum(by_token, axis=2) * factors[:, None]


@triton.jit
def store_keys(
    cache_ptr, slot, ok, x, MXFP4: tl.constexpr, PAGE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Quantise indexer keys x [N, D] f32 and store them at `slot` [N] where `ok`."""
    D: tl.constexpr = x.shape[1]
    base = offset_of(slot // PAGE_SIZE, PAGE_STRIDE)
    offset = slot % PAGE_SIZE
    cache = as_bytes(cache_ptr)
    if MXFP4:
        values, scales = quantize_mxfp4(x, MIN_EXPONENT)  # [N, D/2] u8, [N, D/32] u8
        offs_b = tl.arange(0, D // 2)[None, :]
        rows = cache + (base + offset_of(offset, D // 2, PAGE_SIZE))[:, None]
        tl.store(rows + offs_b, values, mask=ok[:, None])
        footer = (cache + base + PAGE_SIZE * (D // 2) + offset_of(offset, 4, PAGE_SIZE))[:, None]
        for unused in tl.static_range(D // 32, 4):
            tl.store(footer + unused, tl.full([x.shape[0], 1], 127, tl.uint8), mask=ok[:, None])
        tl.store(footer + tl.arange(0, D // 32)[None, :], scales, mask=ok[:, None])
    else:
        values, scales = quantize(x, 1, MIN_EXPONENT)  # [N, D] e4m3, [N] f32
        offs_d = tl.arange(0, D)[None, :]
        rows = cache + (base + offset_of(offset, D, PAGE_SIZE))[:, None]
        tl.store(rows + offs_d, values.to(tl.uint8, bitcast=True), mask=ok[:, None])
        footer = cache + base + PAGE_SIZE * D + offset_of(offset, 4, PAGE_SIZE)
        tl.store(as_floats(footer), scales, mask=ok)
