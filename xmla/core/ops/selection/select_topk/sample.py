"""How large a part of a row gives the bound that its candidates reach, and how many of them are expected."""

import math
from dataclasses import dataclass

import triton.language as tl

from xmla.core.values import arithmetic, larger, next_power_of_2

SLACK_PART = tl.constexpr(24)  # a sample's rank may be missed by rank / SLACK_PART, for fewer steps of its search
SIGMAS = 5  # standard deviations of the sample's error that candidates allow for, to both sides


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a row, one of `step` elements, and what is expected of it.

    It is folded onto `lanes`. Candidates reach the `rank`-th largest of these, and `capacity` of them fit.
    """

    step: int
    lanes: int
    rank: int
    capacity: int

    @classmethod
    def of(cls, columns: int, k: int) -> "Sample":
        """The sample for the k largest of so many columns."""
        # The k-th largest of a row is about the k / step-th of the sample; a rank some deviations lower includes it.
        step = larger(8, next_power_of_2(larger(columns, 1)) // 16384)
        rank = rank_of(k, step)
        lanes = larger(1024, next_power_of_2(4 * rank))
        return cls(step, lanes, rank, larger(1024, next_power_of_2(candidates_of(step, lanes, rank))))


@arithmetic
def rank_of(k: int, step: int) -> int:
    expected = k / step
    return math.ceil(expected + SIGMAS * math.sqrt(expected) + 8)


@arithmetic
def candidates_of(step: int, lanes: int, rank: int) -> int:
    most = rank + rank // SLACK_PART.value
    folded = -lanes * math.log1p(-most / lanes)  # elements of the sample among which are so many lanes' maxima
    return math.ceil(step * folded * (1 + SIGMAS / math.sqrt(rank)))
