"""Candidates: a value and its column in one 64-bit word, and the order of values as unsigned integers.

Order keys are in the order of the floats; NaN is 1, below all numbers, and 0 is an absent element.
"""

import triton
import triton.language as tl

KEY_OF_MINUS_INF = tl.constexpr(0x007FFFFF)
KEY_OF_INF = tl.constexpr(0xFF800000)
ABSENT = tl.constexpr(0x7FC00000 << 32)  # a pair that is no candidate: NaN, which never reaches a threshold


@triton.jit
def order_key(x):
    """float32 → uint32 in the same order; −0 equals +0, NaN is 1, below −inf."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(x == x, key, 1)


@triton.jit
def as_packed(ptr):
    """A pointer to (value, column) pairs as 64-bit words: the value's bits above, the column below."""
    return ptr.to(tl.pointer_type(tl.uint64), bitcast=True)


@triton.jit
def pack(value, column):
    return value.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | column.to(tl.uint32).to(tl.uint64)


@triton.jit
def key_of(pair):
    """The order key of a packed pair's value."""
    return order_key((pair >> 32).to(tl.uint32).to(tl.float32, bitcast=True))
