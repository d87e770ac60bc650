"""What kernels over 16-bit indexer keys are compiled for, in training: `lang.scores` reads these."""

from dataclasses import dataclass
from typing import Self

from xmla.core.call import Problem
from xmla.core.ops.indexer.shared import Keys, Query
from xmla.core.plan import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer(Query):
    """The query, and keys that it is multiplied with."""

    K_STRIDE: int

    @classmethod
    def with_keys(cls, problem: Problem, q: str = "q", k: str = "k", weights: str = "weights") -> Self:
        return cls.of(problem, q, weights, K_STRIDE=problem.specs[k].stride(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges(Constants):
    """Where a token's keys come from: all keys of a range."""

    HAS_ENDS: bool
    HAS_STARTS: bool

    @classmethod
    def of(cls, problem: Problem, **indices: int) -> Self:
        return cls(HAS_ENDS=problem.has("ends"), HAS_STARTS=problem.has("starts"), **indices)

    @property
    def HAS_INDICES(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices(Ranges):
    """Where a token's keys come from: indices, which count within a range."""

    INDEX_STRIDE: int

    @property
    def HAS_INDICES(self) -> bool:
        return True


def columns(problem: Problem) -> Ranges:
    """Where a token's keys come from in a call that may have indices."""
    if problem.has("indices"):
        return Indices.of(problem, INDEX_STRIDE=problem.specs["indices"].stride(0))
    return Ranges.of(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Products(Constants):
    """Constants of every kernel that takes a token's queries and tiles of its keys."""

    INDEXER: Query  # with the keys' stride where they are read
    COLUMNS: Ranges
    BLOCK_N: int  # keys of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(Products):
    """Constants of the kernel of scores over ranges."""

    KEYS: Keys
    BLOCK_T: int  # tokens of a program
    GROUP: int  # tokens of a product


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresDerivative(Products):
    """Constants of the kernels of their derivative."""

    DSCORE_STRIDE: int
