"""A token's slots, a block at a time."""

import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of


@triton.jit
def keys_of(lengths_ptr, token, num_keys, HAS_LENGTHS: tl.constexpr):
    """How many of a token's `num_keys` slots count; may be negative, since a length may be any integer."""
    end = num_keys
    if HAS_LENGTHS:
        end = tl.minimum(tl.load(lengths_ptr + token), num_keys)
    return end


@triton.jit
def load_slot(slots_ptr, token, ok, num_slots, STRIDE: tl.constexpr):
    """The slot of each `token` [N] where `ok`, and which of them are valid."""
    slot = tl.load(slots_ptr + offset_of(token, STRIDE), mask=ok, other=-1)
    return slot, (slot >= 0) & (slot < num_slots)


@triton.jit
def load_slots(slots_ptr, token, first, end, num_slots, slot_stride, BLOCK: tl.constexpr):
    """Slots first … first + BLOCK − 1 of slots [T, K] of a token, and which of them lie before `end` and are valid."""
    offs = first + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + offset_of(token, slot_stride) + offs, mask=offs < end, other=-1)
    return slot, (slot >= 0) & (slot < num_slots)
