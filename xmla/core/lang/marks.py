"""Marks of the entries of a pool that slots name."""

import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import keys_of, load_slots


@triton.jit
def clear_kernel(
    num_elements,
    cleared_ptr,
    BLOCK: tl.constexpr,
):
    offs = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    tl.store(cleared_ptr + offs, tl.zeros([BLOCK], cleared_ptr.dtype.element_ty), mask=offs < num_elements)


@triton.jit
def mark_entries_kernel(
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    num_slots,
    num_keys,  # K
    slot_stride,
    step,  # one token of so many
    mark_stride,  # bytes from one entry's mark to the next
    marks_ptr,  # i8, 1 for entries that a slot names; others stay as they are
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = offset_of(tl.program_id(0), step)
    end = keys_of(lengths_ptr, token, num_keys, HAS_LENGTHS)
    for first in tl.range(0, num_keys, BLOCK):
        slot, ok = load_slots(slots_ptr, token, first, end, num_slots, slot_stride, BLOCK)
        # A store to a mark that many programs write waits for them; a set mark is read from the L1 cache.
        mark_ptrs = marks_ptr + offset_of(slot, mark_stride)
        ok &= tl.load(mark_ptrs, mask=ok, other=1) == 0
        tl.store(mark_ptrs, tl.full([BLOCK], 1, tl.int8), mask=ok)


@triton.jit
def claim_entries(marks_ptr, slot, ok, mark_stride, CLAIMED: tl.constexpr):
    """Mark entries as CLAIMED that are not marked yet, and tell which: one program, and one of equal slots, gets each.

    Marks are bytes, exchanged in words of four.
    """
    place = offset_of(slot, mark_stride)
    ok &= tl.load(marks_ptr + place, mask=ok, other=1) == 0  # from the L1 cache: it may be marked by now
    shift = (place % 4).to(tl.int32) * 8
    words = (marks_ptr + (place - place % 4)).to(tl.pointer_type(tl.int32), bitcast=True)
    before = tl.zeros_like(slot)
    if tl.max(ok.to(tl.int32), 0):
        before = tl.atomic_or(words, CLAIMED << shift, mask=ok)
    return ok & ((before >> shift) % 256 == 0)
