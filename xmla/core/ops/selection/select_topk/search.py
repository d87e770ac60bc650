"""The k-th largest of order keys in registers, by trial thresholds."""

import triton
import triton.language as tl


@triton.jit
def count_two(keys, lower, upper):
    """1 for keys that reach `lower`, and 2**16 more for those that reach `upper` ≥ lower.

    As selections: LLVM counts sums of booleans as bits of a mask, which it gathers in local memory.
    """
    return tl.where(keys >= upper, 0x10001, tl.where(keys >= lower, 1, 0))


@triton.jit
def kth_largest(keys, k, low, high, count, NEAR: tl.constexpr, slack):
    """A threshold in [low, high) that at least k of `keys` reach, and the number that do.

    It is the greatest such threshold to within NEAR, or the first one found that at most k + slack reach. `count` keys
    reach `low`, at least k and fewer than 2**15; fewer than k reach `high`. Two trials share a sum, which costs more
    than the trials.
    """
    while high - low > NEAR:
        third = (high - low + 2) // 3
        lower = low + third
        upper = lower + third
        counts = tl.sum(count_two(keys, lower, upper))
        reach_lower, reach_upper = counts & 0xFFFF, counts >> 16
        high = tl.where(reach_upper >= k, high, tl.where(reach_lower >= k, upper, lower))
        low = tl.where(reach_upper >= k, upper, tl.where(reach_lower >= k, lower, low))
        count = tl.where(reach_upper >= k, reach_upper, tl.where(reach_lower >= k, reach_lower, count))
        high = tl.where(count <= k + slack, low, high)
    return low, count


@triton.jit
def kth_largest_of_few(keys, k, low, high, count, NEAR: tl.constexpr, slack, TRIALS: tl.constexpr):
    """`kth_largest` with TRIALS at a time, for keys [LANES] so few that a step's barriers cost more than its trials.

    A word counts the trials i and i + TRIALS / 2; every thread has all words, so that only one sum crosses warps.
    """
    HALF: tl.constexpr = TRIALS // 2
    word = tl.arange(0, HALF).to(tl.uint32)
    while high - low > NEAR:
        part = (high - low + TRIALS) // (TRIALS + 1)
        lower = low + part * (word + 1)
        upper = lower + part * HALF
        counts = tl.sum(count_two(keys[None, :], lower[:, None], upper[:, None]), 1)
        reach_lower, reach_upper = counts & 0xFFFF, counts >> 16
        passed = tl.sum((reach_lower >= k).to(tl.int32) + (reach_upper >= k).to(tl.int32))
        reach_lower = tl.where(reach_lower >= k, reach_lower, count)
        count = tl.min(tl.minimum(reach_lower, tl.where(reach_upper >= k, reach_upper, reach_lower)))
        low += part * passed.to(tl.uint32)
        high = tl.where(count <= k + slack, low, tl.minimum(high, low + part))
    return low, count
