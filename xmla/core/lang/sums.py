"""Sums whose order does not matter: 64-bit integers in a power of two that all programs know.

The unit follows from a bound on every summand, so that no sum overflows; below the unit a summand is cut off. Buffers
hold a sum as two 32-bit words, since JAX has no 64-bit arrays by default.
"""

import triton
import triton.language as tl

SUM_BITS = tl.constexpr(60)


@triton.jit
def as_sums(ptr):
    """A pointer to 64-bit sums from an 8-byte aligned pointer to words."""
    return ptr.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def exponent_within(bound_bits, most):
    """The e for which |x| · 2**e ≤ 2**most of every |x| within the float32 of these bits; 2**±e are normal float32s."""
    return tl.minimum(tl.maximum(most - ((bound_bits >> 23) - 126), -126), 126)


@triton.jit
def exponent_of_unit(bound_bits, log2_parts):
    """The e for which 2**log2_parts summands x · 2**e, each within the float32 of these bits, sum up to 2**SUM_BITS."""
    return exponent_within(bound_bits, SUM_BITS - log2_parts)
