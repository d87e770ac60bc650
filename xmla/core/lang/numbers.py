"""Number formats inside kernels: scales, e4m3, e2m1, UE8M0. The rules are those of `xmla.core.formats.numbers`."""

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
E4M3_GREATEST_BITS = tl.constexpr(0x43E00000)  # 448.0
E2M1_GREATEST_BITS = tl.constexpr(0x40C00000)  # 6.0
SIGN_AND_E4M3 = tl.constexpr(0x87F00000 - 2**32)  # bits of a float32: the sign, and e4m3's exponent and mantissa


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


def converts_e4m3(_semantic: Any = None) -> tl.constexpr:
    """Whether the architecture that is compiled for has instructions for e4m3, and Triton with them the type."""
    return tl.constexpr(_semantic is None or "fp8e4nv" in _semantic.builder.options.supported_fp8_dtypes)


converts_e4m3.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def decode_e4m3(code):
    """float32 values of e4m3 bytes."""
    if converts_e4m3():
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # Its exponent and mantissa in a float32, where the exponent is 120 too small and NaN is no NaN.
        bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 20) & SIGN_AND_E4M3
        value = bits.to(tl.float32, bitcast=True) * 2.0**120
        return tl.where(tl.abs(value) == 480.0, float("nan"), value)


@triton.jit
def encode_e4m3(x):
    """e4m3 bytes of float32 `x` within ±448 or NaN, rounded to nearest even."""
    if converts_e4m3():
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 in steps of 2**-9, which are those of float32 at 2**14.
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
        return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def encode_e4m3_up(x):
    """e4m3 bytes of float32 `x` from 0 to 448, rounded up.

    Not the nearest byte and perhaps one more: ptxas 12 loses a pair of bytes that `cvt` made if a word joins the pair
    with its own second byte, as the sum does, and the word then has what a register happened to hold.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0xFFFFF) >> 20) - (120 << 3)
    small = tl.ceil(x * 512.0).to(tl.int32)  # below 2**-6 in steps of 2**-9
    return tl.where(bits < 0x3C800000, small, normal).to(tl.uint8)


@triton.jit
def load_e4m3(ptrs, mask):
    """e4m3 bytes at `ptrs` as an operand of products, 0 where not `mask`: bf16, exactly, where there is no e4m3."""
    if converts_e4m3():
        ptrs = ptrs.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    values = tl.load(ptrs) if mask is None else tl.load(ptrs, mask=mask, other=0.0)
    if not converts_e4m3():
        values = decode_e4m3(values).to(tl.bfloat16)
    return values


@triton.jit
def power_of_two_exponent(amax, GREATEST_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Smallest integer e ≥ MIN_EXPONENT with greatest · 2**e ≥ amax: the bits' difference over 2**23, rounded up."""
    return tl.maximum((amax.to(tl.int32, bitcast=True) - GREATEST_BITS + 0x7FFFFF) >> 23, MIN_EXPONENT)


def _power_of_two(exponent):
    """2**exponent in float32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


power_of_two = triton.jit(_power_of_two)
gluon_power_of_two = gluon.jit(_power_of_two)


@triton.jit
def quantize(x, axis: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """e4m3 bytes and float32 power-of-two scales of float32 `x`, one scale over `axis` (the last).

    Multiplying by a power of two is exact, so only the cast rounds. NaN stays NaN and is ignored in the scale.
    """
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=axis)
    exponent = power_of_two_exponent(amax, E4M3_GREATEST_BITS, MIN_EXPONENT)
    scaled = x * tl.expand_dims(power_of_two(-exponent), axis)
    scaled = tl.minimum(tl.maximum(scaled, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
    return encode_e4m3(scaled), power_of_two(exponent)


@triton.jit
def decode_e2m1(code):
    """float16 values of 4-bit codes: the three magnitude bits become exponent and mantissa bits of a float16."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def encode_e2m1(x):
    """4-bit codes of float32 `x` within ±6, rounded to nearest, ties to the even code; −0 keeps its sign."""
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
def decode_ue8m0_words(word):
    """float32 scales of words of four equal UE8M0 bytes, NaN where the bytes differ."""
    byte = word & 0xFF
    return tl.where(word == (word << 8 | byte), decode_ue8m0(byte), float("nan"))


@triton.jit
def encode_ue8m0_words(scale):
    """Words of four equal UE8M0 bytes, of scales as of `encode_ue8m0`."""
    byte = encode_ue8m0(scale).to(tl.int32)
    pair = byte | byte << 8
    return pair | pair << 16


@triton.jit
def pack_e2m1(scaled, whole):
    """Bytes [N, G · TILE / 2] of two e2m1 values each, of float32 [N, G, TILE] clamped to ±6; 6 where not `whole`."""
    code = encode_e2m1(tl.where(whole, tl.minimum(tl.maximum(scaled, -6.0), 6.0), 6.0))
    low, high = tl.split(tl.reshape(code, (code.shape[0], code.shape[1] * code.shape[2] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def quantize_e2m1(tiled, MIN_EXPONENT: tl.constexpr):
    """e2m1 bytes (`pack_e2m1`) and power-of-two scales [N, G] f32 of float32 [N, G, TILE].

    e2m1 has no NaN: a NaN makes its tile's scale NaN and is itself stored as 6, as the conversion instruction does.
    """
    whole = tiled == tiled
    amax = tl.max(tl.where(whole, tl.abs(tiled), 0.0), axis=2)
    exponent = power_of_two_exponent(amax, E2M1_GREATEST_BITS, MIN_EXPONENT)
    scale = tl.where(tl.min(tl.where(whole, 1, 0), axis=2) == 0, float("nan"), power_of_two(exponent))
    return pack_e2m1(tiled * power_of_two(-exponent)[:, :, None], whole), scale


@triton.jit
def quantize_nvfp4(tiled, MIN_EXPONENT: tl.constexpr, UP: tl.constexpr):
    """e2m1 bytes (`pack_e2m1`) and e4m3 scale bytes [N, G] of float32 [N, G, TILE]: `formats.numbers.quantize_nvfp4`.

    Quotients are rounded to nearest. The default division is not, and misses ties.
    """
    whole = tiled == tiled
    amax = tl.max(tl.where(whole, tl.abs(tiled), 0.0), axis=2)
    exact = tl.minimum(tl.maximum(tl.math.div_rn(amax, 6.0), 2.0**MIN_EXPONENT), 448.0)
    stored = encode_e4m3_up(exact) if UP else encode_e4m3(exact)
    quotient = tl.math.div_rn(tiled, decode_e4m3(stored)[:, :, None])
    scales = tl.where(tl.min(tl.where(whole, 1, 0), axis=2) == 0, 0x7F, stored)
    return pack_e2m1(quotient, whole), scales.to(tl.uint8)


@triton.jit
def quantize_mxfp4(x, MIN_EXPONENT: tl.constexpr):
    """Packed e2m1 [N, D/2] u8 and UE8M0 [N, D/32] u8 of float32 `x` [N, D]: `formats.numbers.quantize_mxfp4`."""
    packed, scale = quantize_e2m1(tl.reshape(x, (x.shape[0], x.shape[1] // 32, 32)), MIN_EXPONENT)
    return packed, encode_ue8m0(scale)


@triton.jit
def dequantize_mxfp4(packed, scales):
    """Dequantise packed e2m1 [N, D/2] u8 and UE8M0 [N, D/32] u8 to bf16 [N, D]; exact: two bits and an exponent fit."""
    values = tl.reshape(unpack_e2m1(packed), (packed.shape[0], scales.shape[1], 32))
    scaled = (values * decode_ue8m0(scales)[:, :, None]).to(tl.bfloat16)
    return tl.reshape(scaled, (packed.shape[0], packed.shape[1] * 2))


@triton.jit
def hidden(x, HIDE: tl.constexpr):
    """16-bit `x`, an operand of products. With HIDE the compiler does not see that it was computed from bytes.

    Else Triton 3.7 to 3.9 lay operands of mma.sync out for the bytes (kWidth 4): without ldmatrix, twice in shared
    memory if two products share it, and the load of the bytes is not pipelined.
    """
    if HIDE:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x
