"""The keys of a few tokens in one list, so that an entry that several of them name is added to once.

Each token's valid slots are put in ascending order, and those of a group of tokens are merged: an entry stands once, or
as often as the token that names it most, with the rank that it has in each token's own order. That order, and with it
the bits of dq, does not depend on other tokens.

A program counts, of a group at a time, how often each token names each entry, in fields of two integers an entry. It
then reads the counts of the entries between the least and the greatest one, and clears them.
"""

import triton
import triton.language as tl

from xmla.core.lang.numbers import power_of_two
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import keys_of, load_slots
from xmla.core.lang.sums import SUMMAND_BITS, as_sums, exponent_within, low_bits

TOKENS = tl.constexpr(8)  # of a group
COUNT_BITS = tl.constexpr(16)  # of 64, for each token
MOST_COUNTED = tl.constexpr(2 ** (COUNT_BITS.value - 1) - 1)


@triton.jit
def of_token(first, second, NUMBER: tl.constexpr):
    """The field of a token in two integers."""
    packed = first if NUMBER * COUNT_BITS < 64 else second
    return (packed >> NUMBER * COUNT_BITS % 64).to(tl.int32) & MOST_COUNTED


@triton.jit
def merge_slots_kernel(
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    references_ptr,  # [P, R] i32
    bounds_ptr,  # [P, R] i32
    num_slots,
    num_keys,  # K ≤ MOST_COUNTED
    slot_stride,
    num_tokens,  # T
    first_token,
    num_groups,
    counts_ptr,  # [programs, P·R, 4] i32: 0 before and after
    ordered_ptr,  # [tokens of a launch, K] i32: a token's valid slots
    ends_ptr,  # [tokens of a launch] i32: how many those are
    places_ptr,  # [groups, TOKENS·K] i32: the entries that a group names
    units_ptr,  # [groups, TOKENS·K] i32: what their summands are multiplied by, as float32 | `low_bits`
    ranks_ptr,  # [groups, TOKENS, TOKENS·K] i32: which of a token's slots in order that is, −1 if it names it not
    merged_ends_ptr,  # [groups] i32
    ADDITIONS: tl.constexpr,  # to an entry's low words per reference
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    counts = as_sums(counts_ptr + 4 * offset_of(tl.program_id(0), num_slots))
    programs = tl.num_programs(0)
    most_merged = TOKENS * num_keys.to(tl.int64)
    for turn in tl.range(0, tl.cdiv(num_groups - tl.program_id(0), programs)):
        group = tl.program_id(0) + turn * programs
        least = tl.full([BLOCK], num_slots, tl.int32)
        greatest = tl.full([BLOCK], -1, tl.int32)
        for number in tl.static_range(TOKENS):
            local = group * TOKENS + number
            token = tl.minimum(first_token + local, num_tokens - 1).to(tl.int64)
            end = keys_of(lengths_ptr, token, num_keys, HAS_LENGTHS)
            end = tl.where(first_token + local < num_tokens, end, 0)
            one = tl.full([BLOCK], 1, tl.int64) << number * COUNT_BITS % 64
            for first in tl.range(0, num_keys, BLOCK):
                slot, ok = load_slots(slots_ptr, token, first, end, num_slots, slot_stride, BLOCK)
                tl.atomic_add(counts + 2 * slot + number * COUNT_BITS // 64, one, mask=ok, sem="relaxed")
                least = tl.minimum(least, tl.where(ok, slot, num_slots))
                greatest = tl.maximum(greatest, tl.where(ok, slot, -1))
        tl.debug_barrier()
        last = tl.max(greatest, 0)
        of_group = offset_of(group, most_merged)
        places, units = places_ptr + of_group, units_ptr + of_group
        ranks = ranks_ptr + TOKENS * of_group
        ordered = ordered_ptr + of_group
        placed = 0
        first_ranked = tl.zeros([], tl.int64)  # fields of all tokens
        second_ranked = tl.zeros([], tl.int64)
        for first in tl.range(tl.min(least, 0), last + 1, BLOCK):
            slot = first + tl.arange(0, BLOCK)
            ok = slot <= last
            # Additions passed the L1 cache.
            first_count = tl.load(counts + 2 * slot, mask=ok, other=0, cache_modifier=".cg")
            second_count = tl.load(counts + 2 * slot + 1, mask=ok, other=0, cache_modifier=".cg")
            tl.store(counts + 2 * slot, tl.zeros([BLOCK], tl.int64), mask=ok)
            tl.store(counts + 2 * slot + 1, tl.zeros([BLOCK], tl.int64), mask=ok)
            most = tl.zeros([BLOCK], tl.int32)
            for number in tl.static_range(TOKENS):
                most = tl.maximum(most, of_token(first_count, second_count, number))
            place = placed + tl.cumsum(most, 0) - most
            first_before = first_ranked + tl.cumsum(first_count, 0) - first_count
            second_before = second_ranked + tl.cumsum(second_count, 0) - second_count
            references = tl.load(references_ptr + slot, mask=most > 0, other=1)
            bound = tl.load(bounds_ptr + slot, mask=most > 0, other=0)
            unit = power_of_two(exponent_within(bound, SUMMAND_BITS)).to(tl.int32, bitcast=True)
            # Where NOT_A_NUMBER stands in place of references it does not matter what is added.
            unit |= low_bits(tl.maximum(references, 1) * ADDITIONS)
            for time in tl.range(0, tl.max(most, 0)):
                named = most > time
                tl.store(places + place + time, slot, mask=named)
                tl.store(units + place + time, unit, mask=named)
                for number in tl.static_range(TOKENS):
                    mine = of_token(first_count, second_count, number) > time
                    rank = of_token(first_before, second_before, number) + time
                    at = ranks + number * most_merged + place + time
                    tl.store(at, tl.where(mine, rank, -1), mask=named)
                    tl.store(ordered + number * num_keys.to(tl.int64) + rank, slot, mask=mine)
            placed += tl.sum(most, 0)
            first_ranked += tl.sum(first_count, 0)
            second_ranked += tl.sum(second_count, 0)
        tl.store(merged_ends_ptr + group, placed)
        for number in tl.static_range(TOKENS):
            end = of_token(first_ranked, second_ranked, number)
            tl.store(ends_ptr + group * TOKENS + number, end)
        tl.debug_barrier()  # zeros are there before the next group's additions
