"""The k best of a row's candidates, in two launches.

`merge_choose_kernel` finds the threshold of the total order bit by bit: first of the values, then, only if more
candidates tie than there is room for, of the indices. It stores the winners in any order. The second launch lists them
by ascending index: `merge_sort_kernel` if a program holds them all, else `merge_order_kernel`, in which a winner's
place is the number of winners before it.
"""

import triton
import triton.language as tl

from xmla.core.lang.offsets import multiple, offset_of
from xmla.core.ops.selection.select_topk.pairs import order_key


@triton.jit
def load_candidates(
    values_ptr, indices_ptr, row, candidate, num_candidates, value_stride_w, index_stride_w,
    VALUE_STRIDE_T: tl.constexpr, INDEX_STRIDE_T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Order keys u32, 0 of padding, indices and values of a row's candidates; `candidate` counts over all parts."""
    inside = candidate < num_candidates
    part, place = candidate // N, candidate % N
    index_ptrs = indices_ptr + offset_of(part, index_stride_w) + offset_of(row, INDEX_STRIDE_T) + place
    index = tl.load(index_ptrs, mask=inside, other=-1)
    valid = index >= 0
    value_ptrs = values_ptr + offset_of(part, value_stride_w) + offset_of(row, VALUE_STRIDE_T) + place
    value = tl.load(value_ptrs, mask=valid, other=0.0)
    return tl.where(valid, order_key(value), 0), index, value


@triton.jit
def reversed_index(index):
    """A larger key for a smaller index ≥ 0; never 0."""
    return (0x7FFFFFFF - index).to(tl.uint32) + 1


@triton.jit
def count_reached(keys, threshold, bit):
    """How many keys reach the threshold with its next two bits 01, 10 and 11; `bit` is the lower of the two."""
    first = (keys >= (threshold | bit)).to(tl.int64)
    second = (keys >= (threshold | (bit << 1))).to(tl.int64)
    third = (keys >= (threshold | (bit << 1) | bit)).to(tl.int64)
    packed = tl.sum(first + (second << 21) + (third << 42))  # a tile has fewer than 2**21
    return (packed & 0x1FFFFF).to(tl.int32), ((packed >> 21) & 0x1FFFFF).to(tl.int32), (packed >> 42).to(tl.int32)


@triton.jit
def merge_choose_kernel(
    values_ptr,  # [W, T, N] f32
    indices_ptr,  # [W, T, N] i32
    num_candidates,  # W · N
    value_stride_w,
    index_stride_w,
    chosen_values_ptr,  # [T, K] f32
    chosen_ptr,  # [T, K] i32
    counts_ptr,  # [T] i32, how many were chosen
    UNIT: tl.constexpr,  # of the strides of W
    VALUE_STRIDE_T: tl.constexpr,
    INDEX_STRIDE_T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    ONE_TILE: tl.constexpr,  # all candidates stay in registers
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, TILE)
    value_stride_w, index_stride_w = multiple(value_stride_w, UNIT), multiple(index_stride_w, UNIT)
    keys, index, _value = load_candidates(
        values_ptr, indices_ptr, row, offs, num_candidates,
        value_stride_w, index_stride_w, VALUE_STRIDE_T, INDEX_STRIDE_T, N,
    )  # fmt: skip

    threshold = tl.full([], 0, tl.uint32)
    above = 0  # candidates over the threshold
    equal = 0  # and on it
    bit = tl.full([], 0x40000000, tl.uint32)  # two bits at a time, since a step waits for its reduction
    for _ in tl.range(0, 16):
        low, middle, high = count_reached(keys, threshold, bit)
        if not ONE_TILE:
            for base in tl.range(TILE, num_candidates, TILE):
                more, _index, _value = load_candidates(
                    values_ptr, indices_ptr, row, base + offs, num_candidates,
                    value_stride_w, index_stride_w, VALUE_STRIDE_T, INDEX_STRIDE_T, N,
                )  # fmt: skip
                more_low, more_middle, more_high = count_reached(more, threshold, bit)
                low += more_low
                middle += more_middle
                high += more_high
        above = tl.where(high >= K, above, tl.where(middle >= K, high, tl.where(low >= K, middle, low)))
        equal = tl.where(high >= K, high, tl.where(middle >= K, middle, tl.where(low >= K, low, equal)))
        threshold |= tl.where(middle >= K, bit << 1, 0)
        threshold |= tl.where((high >= K) | ((low >= K) & (middle < K)), bit, 0)
        bit = bit >> 2
    # `equal` counts all that reach the threshold; nothing ties on 0, which is padding.
    tied = tl.where(threshold > 0, equal - above, 0)

    index_threshold = tl.full([], 1, tl.uint32)
    index_above = 0  # ties over the threshold of indices
    if tied > K - above:
        index_threshold = tl.full([], 0, tl.uint32)
        bit = tl.full([], 0x80000000, tl.uint32)
        for _ in tl.range(0, 32):
            trial = index_threshold | bit
            reached = tl.sum(((keys == threshold) & (reversed_index(index) >= trial)).to(tl.int32))
            if not ONE_TILE:
                for base in tl.range(TILE, num_candidates, TILE):
                    more, more_index, _value = load_candidates(
                        values_ptr, indices_ptr, row, base + offs, num_candidates,
                        value_stride_w, index_stride_w, VALUE_STRIDE_T, INDEX_STRIDE_T, N,
                    )  # fmt: skip
                    reached += tl.sum(((more == threshold) & (reversed_index(more_index) >= trial)).to(tl.int32))
            index_threshold = tl.where(reached >= K - above, trial, index_threshold)
            index_above = tl.where(reached >= K - above, index_above, reached)
            bit = bit >> 1
    room = K - above - index_above  # more than one candidate only if an index occurs twice

    count = 0
    seen = 0
    for base in tl.range(0, num_candidates, TILE):
        # Loaded again even if all candidates are in registers, which have no room for the values.
        keys, index, value = load_candidates(
            values_ptr, indices_ptr, row, base + offs, num_candidates,
            value_stride_w, index_stride_w, VALUE_STRIDE_T, INDEX_STRIDE_T, N,
        )  # fmt: skip
        equal_keys = (keys == threshold) & (keys > 0)
        last = equal_keys & (reversed_index(index) == index_threshold)
        rank = seen + tl.cumsum(last.to(tl.int32), 0)
        over = (keys > threshold) | (equal_keys & (reversed_index(index) > index_threshold))
        chosen = over | (last & (rank <= room))
        seen += tl.sum(last.to(tl.int32))
        place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(chosen_values_ptr + offset_of(row, K) + place, value, mask=chosen)
        tl.store(chosen_ptr + offset_of(row, K) + place, index, mask=chosen)
        count += tl.sum(chosen.to(tl.int32))
    tl.store(counts_ptr + row, count)


@triton.jit
def merge_order_kernel(
    chosen_values_ptr,  # [T, K] f32
    chosen_ptr,  # [T, K] i32, distinct
    counts_ptr,  # [T] i32
    top_values_ptr,  # [T, K] f32
    top_indices_ptr,  # [T, K] i32
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = offset_of(tl.program_id(0) // BLOCKS, K)
    offs_k = tl.program_id(0) % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    count = tl.load(counts_ptr + tl.program_id(0) // BLOCKS)
    mine = offs_k < count
    index = tl.load(chosen_ptr + row + offs_k, mask=mine, other=0)
    value = tl.load(chosen_values_ptr + row + offs_k, mask=mine, other=0.0)
    place = tl.zeros([BLOCK_K], tl.int32)
    for base in tl.range(0, K, BLOCK_N):
        offs_n = base + tl.arange(0, BLOCK_N)
        other = tl.load(chosen_ptr + row + offs_n, mask=offs_n < count, other=0x7FFFFFFF)
        # An index that occurs twice gets two places.
        before = (other[None, :] < index[:, None]) | (
            (other[None, :] == index[:, None]) & (offs_n[None, :] < offs_k[:, None])
        )
        place += tl.sum(before.to(tl.int32), axis=1)
    # Places from `count` on are padding.
    place = tl.where(mine, place, offs_k)
    tl.store(top_values_ptr + row + place, tl.where(mine, value, float("-inf")), mask=offs_k < K)
    tl.store(top_indices_ptr + row + place, tl.where(mine, index, -1), mask=offs_k < K)


@triton.jit
def merge_sort_kernel(
    chosen_values_ptr,  # [T, K] f32
    chosen_ptr,  # [T, K] i32
    counts_ptr,  # [T] i32
    top_values_ptr,  # [T, K] f32
    top_indices_ptr,  # [T, K] i32
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # ≥ K
):
    row = offset_of(tl.program_id(0), K)
    offs_k = tl.arange(0, BLOCK_K)
    count = tl.load(counts_ptr + tl.program_id(0))
    index = tl.load(chosen_ptr + row + offs_k, mask=offs_k < count, other=0x7FFFFFFF)
    # An index that occurs twice keeps its order: the lower half is where a winner stands.
    order = tl.sort((index.to(tl.int64) << 32) | offs_k.to(tl.int64))
    mine = offs_k < count
    place = (order & 0x7FFFFFFF).to(tl.int32)
    value = tl.load(chosen_values_ptr + row + place, mask=mine, other=float("-inf"))
    tl.store(top_values_ptr + row + offs_k, value, mask=offs_k < K)
    tl.store(top_indices_ptr + row + offs_k, tl.where(mine, (order >> 32).to(tl.int32), -1), mask=offs_k < K)
