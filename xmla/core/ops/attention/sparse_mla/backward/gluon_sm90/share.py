"""Tokens with few heads that share tiles: every entry that one of a group names stands once, with who names it.

The rows of a tile are the heads of a group's tokens, of which one may not name the entry. Entries stand in ascending
order. One that a token names several times stands as often.

A program counts, of a group at a time, how often each token names each entry, in fields of one integer an entry. It
then reads the counts of the entries between the least and the greatest one, and clears them.
"""

import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import keys_of, load_slots
from xmla.core.lang.sums import as_sums

MOST_TOKENS = 4  # of a group: a count of each in 64 bits
COUNT_BITS = tl.constexpr(16)
COUNT = tl.constexpr(2**COUNT_BITS.value - 1)
SLOT_BITS = tl.constexpr(27)  # of an entry among those of a group, below a bit for each token


@triton.jit
def share_slots_kernel(
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    num_slots,  # ≤ 2**SLOT_BITS
    num_keys,  # K ≤ COUNT
    slot_stride,
    num_tokens,  # T
    counts_ptr,  # [programs, P·R, 2] i32: 0 before and after
    ordered_ptr,  # [groups, TOKENS · K] i32
    ends_ptr,  # [groups] i32: how many those of a group are
    TOKENS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    counts = as_sums(counts_ptr + offset_of(tl.program_id(0), 2 * num_slots))
    programs, groups = tl.num_programs(0), tl.cdiv(num_tokens, TOKENS)
    for turn in tl.range(0, tl.cdiv(groups - tl.program_id(0), programs)):
        group = tl.program_id(0) + turn * programs
        least = tl.full([BLOCK], num_slots, tl.int32)
        greatest = tl.full([BLOCK], -1, tl.int32)
        for number in tl.static_range(TOKENS):
            token = tl.minimum(group * TOKENS + number, num_tokens - 1).to(tl.int64)
            end = keys_of(lengths_ptr, token, num_keys, HAS_LENGTHS)
            end = tl.where(group * TOKENS + number < num_tokens, end, 0)
            one = tl.full([BLOCK], 1, tl.int64) << number * COUNT_BITS
            for first in tl.range(0, num_keys, BLOCK):
                slot, ok = load_slots(slots_ptr, token, first, end, num_slots, slot_stride, BLOCK)
                tl.atomic_add(counts + slot, one, mask=ok, sem="relaxed")
                least = tl.minimum(least, tl.where(ok, slot, num_slots))
                greatest = tl.maximum(greatest, tl.where(ok, slot, -1))
        tl.debug_barrier()
        last = tl.max(greatest, 0)
        ordered = ordered_ptr + offset_of(group, TOKENS * num_keys)
        placed = 0
        for first in tl.range(tl.min(least, 0), last + 1, BLOCK):
            slot = first + tl.arange(0, BLOCK)
            ok = slot <= last
            count = tl.load(counts + slot, mask=ok, other=0, cache_modifier=".cg")  # additions passed the L1 cache
            tl.store(counts + slot, tl.zeros([BLOCK], tl.int64), mask=ok)
            most = tl.zeros([BLOCK], tl.int32)
            for number in tl.static_range(TOKENS):
                most = tl.maximum(most, (count >> number * COUNT_BITS & COUNT).to(tl.int32))
            place = placed + tl.cumsum(most, 0) - most
            for time in tl.range(0, tl.max(most, 0)):
                word = slot
                for number in tl.static_range(TOKENS):
                    names = (count >> number * COUNT_BITS & COUNT).to(tl.int32) > time
                    word |= names.to(tl.int32) << SLOT_BITS + number
                tl.store(ordered + place + time, word, mask=most > time)
            placed += tl.sum(most, 0)
        tl.store(ends_ptr + group, placed)
        tl.debug_barrier()  # zeros are there before the next group's additions
