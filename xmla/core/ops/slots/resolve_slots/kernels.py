import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of


@triton.jit
def _entry_of(indices, column, num_keys, index_stride, num_columns, num_entries):
    """The entries of a request's columns, and which of them name one."""
    row = indices + offset_of(column // num_keys, index_stride)
    entry = tl.load(row + column % num_keys, mask=column < num_columns, other=-1)
    return entry, (entry >= 0) & (entry < num_entries)


@triton.jit
def _held_in(held, place, num_places, num_entries):
    """The entries in places, and which of them are entries."""
    entry = tl.load(held + place, mask=place < num_places, other=-1)
    return entry, (entry >= 0) & (entry < num_entries)


@triton.jit
def resolve_slots_kernel(
    indices_ptr,  # [T, K] i32
    held_ptr,  # [B, PLACES] i32, updated in place
    slots_ptr,  # [B, PLACES] i32, updated in place
    num_keys,  # K
    index_stride,
    next_n,  # tokens of a request
    num_columns,  # next_n · K
    held_stride,
    slot_stride,
    num_places,
    num_entries,
    selected_ptr,  # [T, K] i32
    missing_ptr,  # [B, next_n · K] i32
    destinations_ptr,  # [B, next_n · K] i32
    counts_ptr,  # [B] i32
    place_of_ptr,  # [B, num_entries] i32: j of place j, −1 − c of column c, the greatest that has the entry
    named_ptr,  # [B, PLACES] i32: whether a column names the entry in a place
    new_held_ptr,  # [B, PLACES] i32
    new_slots_ptr,  # [B, PLACES] i32
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    indices = indices_ptr + offset_of(request * next_n, index_stride)
    held, slots = held_ptr + offset_of(request, held_stride), slots_ptr + offset_of(request, slot_stride)
    selected, missing = selected_ptr + request * num_columns, missing_ptr + request * num_columns
    destinations = destinations_ptr + request * num_columns
    place_of, named = place_of_ptr + request * num_entries, named_ptr + request * num_places
    new_held, new_slots = new_held_ptr + request * num_places, new_slots_ptr + request * num_places

    for first in tl.range(0, num_places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        entry, ok = _held_in(held, place, num_places, num_entries)
        tl.store(place_of + entry, -(2**31), mask=ok)
        tl.store(named + place, 0, mask=place < num_places)
    for first in tl.range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        entry, ok = _entry_of(indices, column, num_keys, index_stride, num_columns, num_entries)
        tl.store(place_of + entry, -(2**31), mask=ok)
    tl.debug_barrier()  # here and below: other threads wrote what this one reads
    for first in tl.range(0, num_places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        entry, ok = _held_in(held, place, num_places, num_entries)
        tl.atomic_max(place_of + entry, place, mask=ok, sem="relaxed")
    for first in tl.range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        entry, ok = _entry_of(indices, column, num_keys, index_stride, num_columns, num_entries)
        tl.atomic_max(place_of + entry, -1 - column, mask=ok, sem="relaxed")
    tl.debug_barrier()

    count = 0
    for first in tl.range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        entry, ok = _entry_of(indices, column, num_keys, index_stride, num_columns, num_entries)
        place = tl.load(place_of + entry, mask=ok, other=-(2**31))
        tl.store(named + place, 1, mask=place >= 0)
        absent = ok & (place == -1 - column)
        tl.store(missing + count + tl.cumsum(absent.to(tl.int32), 0) - 1, entry, mask=absent)
        count += tl.sum(absent.to(tl.int32))
    for first in tl.range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        rest = (column >= count) & (column < num_columns)
        tl.store(missing + column, -1, mask=rest)
        tl.store(destinations + column, -1, mask=rest)
    tl.store(counts_ptr + request, count)
    tl.debug_barrier()

    num_free = num_places
    for first in tl.range(0, num_places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        num_free -= tl.sum(tl.load(named + place, mask=place < num_places, other=0))
    free_before = 0
    for first in tl.range(0, num_places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ok = place < num_places
        entry, slot = tl.load(held + place, mask=ok), tl.load(slots + place, mask=ok)
        free = (tl.load(named + place, mask=ok, other=1) == 0).to(tl.int32)
        rank = free_before + tl.cumsum(free, 0) - free  # free places before this one
        given = (free == 1) & (rank < count)
        entry = tl.where(given, tl.load(missing + rank, mask=given, other=-1), entry)
        tl.store(destinations + rank, slot, mask=given)
        tl.store(place_of + entry, place, mask=given)
        kept = tl.where(given, num_free - count + rank, rank - count)
        new = tl.where(free == 1, kept, num_free + place - rank)
        tl.store(new_held + new, entry, mask=ok)
        tl.store(new_slots + new, slot, mask=ok)
        free_before += tl.sum(free)
    tl.debug_barrier()

    for first in tl.range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        entry, ok = _entry_of(indices, column, num_keys, index_stride, num_columns, num_entries)
        place = tl.load(place_of + entry, mask=ok, other=0)
        slot = tl.load(slots + place, mask=ok, other=-1)
        tl.store(selected + column, slot, mask=column < num_columns)
    tl.debug_barrier()  # the slots of the old list are read
    for first in tl.range(0, num_places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ok = place < num_places
        tl.store(held + place, tl.load(new_held + place, mask=ok), mask=ok)
        tl.store(slots + place, tl.load(new_slots + place, mask=ok), mask=ok)
