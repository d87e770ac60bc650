"""The order in which kernels for Hopper take a token's keys: buckets of neighbouring entries, in ascending order.

CTAs that start together then add to neighbouring entries at any time, whose sums the L2 cache keeps. Buckets divide the
range of a token's own keys, so that the order, and with it the bits of dq, does not depend on other tokens.

What is counted of buckets is packed, FIELDS in an integer of 64 bits. Tensors have GROUPS of such integers, ROWS slots
of each thread, and a COLUMN for each thread, in that order.
"""

import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import keys_of

MOST_KEYS = 2**21 - 1
GROUPS = tl.constexpr(4)
FIELDS = tl.constexpr(3)
BUCKETS = tl.constexpr(GROUPS.value * FIELDS.value)
BITS = tl.constexpr(21)  # of a field
FIELD = tl.constexpr(MOST_KEYS)
ONE_OF_EACH = tl.constexpr(1 | 1 << BITS.value | 1 << 2 * BITS.value)
COLUMNS = tl.constexpr(128)


@triton.jit
def load_rows(slots, first, end, num_slots, ROWS: tl.constexpr):
    """ROWS · COLUMNS of a token's slots from `first` on, and which are valid: [ROWS, COLUMNS]."""
    offs = first + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    slot = tl.load(slots + offs, mask=offs < end, other=-1)
    return slot, (slot >= 0) & (slot < num_slots)


@triton.jit
def count(slot, ok, least, per_entry):
    """1 in the field of each slot's bucket, [GROUPS, ROWS, COLUMNS], and where that is: [1, ROWS, COLUMNS]."""
    bucket = tl.minimum(tl.where(ok, slot - least, 0).to(tl.float32) * per_entry, BUCKETS - 1.0).to(tl.int32)
    bucket = tl.expand_dims(tl.where(ok, bucket, BUCKETS), 0)
    bit = (bucket % FIELDS * BITS).to(tl.int64)
    mine = bucket // FIELDS == tl.arange(0, GROUPS)[:, None, None]
    return tl.where(mine, tl.full(bit.shape, 1, tl.int64) << bit, 0), bit


@triton.jit
def order_slots_kernel(
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    num_slots,
    num_keys,  # K ≤ MOST_KEYS
    slot_stride,
    ordered_ptr,  # [T, K] i32: a token's valid slots
    ends_ptr,  # [T] i32: how many those are
    HAS_LENGTHS: tl.constexpr,
    ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    end = keys_of(lengths_ptr, token, num_keys, HAS_LENGTHS)
    slots = slots_ptr + offset_of(token, slot_stride)
    least = tl.full([ROWS, COLUMNS], num_slots, tl.int32)
    greatest = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in tl.range(0, num_keys, ROWS * COLUMNS):
        slot, ok = load_rows(slots, first, end, num_slots, ROWS)
        least = tl.minimum(least, tl.where(ok, slot, num_slots))
        greatest = tl.maximum(greatest, tl.where(ok, slot, 0))
    least = tl.min(tl.min(least, 0), 0)
    extent = tl.maximum(tl.max(tl.max(greatest, 0), 0) - least, 0)
    per_entry = BUCKETS / (extent.to(tl.float32) + 1.0)

    counts = tl.zeros([GROUPS, COLUMNS], tl.int64)
    for first in tl.range(0, num_keys, ROWS * COLUMNS):
        slot, ok = load_rows(slots, first, end, num_slots, ROWS)
        one, _ = count(slot, ok, least, per_entry)
        counts += tl.sum(one, 1)
    counts = tl.sum(counts, 1)
    of_groups = (counts & FIELD) + (counts >> BITS & FIELD) + (counts >> 2 * BITS & FIELD)
    tl.store(ends_ptr + token, tl.sum(of_groups, 0).to(tl.int32))
    starts = (tl.cumsum(of_groups, 0) - of_groups) * ONE_OF_EACH + (counts << BITS) + (counts << 2 * BITS)

    ordered_ptr += offset_of(token, num_keys)
    for first in tl.range(0, num_keys, ROWS * COLUMNS):
        slot, ok = load_rows(slots, first, end, num_slots, ROWS)
        one, bit = count(slot, ok, least, per_entry)
        of_columns = tl.sum(one, 1)
        before = starts[:, None] + tl.cumsum(of_columns, 1) - of_columns
        place = tl.expand_dims(before, 1) + tl.cumsum(one, 1) - one
        place = tl.sum(tl.where(one != 0, place >> bit & FIELD, 0), 0)
        tl.store(ordered_ptr + place, slot, mask=ok)
        starts += tl.sum(of_columns, 1)
