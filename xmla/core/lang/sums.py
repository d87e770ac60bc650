"""Sums whose order does not matter: integers in a power of two that all programs know.

The unit follows from a bound on every summand, so that no sum overflows; below the unit a summand is cut off, or it is
rounded. Buffers are of 32-bit words, since JAX has no 64-bit arrays by default.

A sum is one 64-bit integer (`exponent_of_unit`), or, where additions take the time, two: of the summands' low bits in
32 bits and of their high ones in 64 (`parts_of`). Most summands have no high bits, and half as many bytes to add.
"""

import triton
import triton.language as tl
from triton.experimental import gluon

SUM_BITS = tl.constexpr(60)
SUMMAND_BITS = tl.constexpr(30)  # of a summand's bound; summands, which have a sign, may be 1.75 times as large
LOW_BITS = tl.constexpr(28)  # at most
SUM_WORDS = 3  # of a sum in two parts


@triton.jit
def as_sums(ptr):
    """A pointer to 64-bit sums from an 8-byte aligned pointer to words."""
    return ptr.to(tl.pointer_type(tl.int64), bitcast=True)


def _exponent_within(bound_bits, most):
    """The e for which |x| · 2**e ≤ 2**most of every |x| within the float32 of these bits; 2**±e are normal float32s."""
    exponent = most - ((bound_bits >> 23) - 126)
    exponent = tl.where(exponent < -126, -126, exponent)
    return tl.where(exponent > 126, 126, exponent)


def _low_bits(count):
    """The bits of the low parts, 1 to LOW_BITS, of `count` ≥ 1 summands: their sum does not overflow 32 bits."""
    bits = 31 - ((count.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127)
    bits = tl.where(bits < 1, 1, bits)
    return tl.where(bits > LOW_BITS, LOW_BITS, bits)


exponent_within = triton.jit(_exponent_within)
gluon_exponent_within = gluon.jit(_exponent_within)
low_bits = triton.jit(_low_bits)
gluon_low_bits = gluon.jit(_low_bits)


@triton.jit
def parts_of(x, bits):
    """x as low part of so many bits, with a sign, and high part: x = low + high · 2**bits; x < 2**31 − 2**(bits−1)."""
    high = (x + (1 << (bits - 1))) >> bits
    return x - (high << bits), high


@triton.jit
def exponent_of_unit(bound_bits, log2_parts):
    """The e for which 2**log2_parts summands x · 2**e, each within the float32 of these bits, sum up to 2**SUM_BITS."""
    return exponent_within(bound_bits, SUM_BITS - log2_parts)
