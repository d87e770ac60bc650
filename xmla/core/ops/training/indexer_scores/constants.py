"""What kernels over 16-bit indexer keys are compiled for, in training: `lang.scores` reads these."""

from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.indexer.shared import Keys, head_rows
from xmla.core.plan import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer(Constants):
    """Queries, keys and weights."""

    HEADS: int
    D: int
    Q_STRIDE_T: int
    Q_STRIDE_I: int
    K_STRIDE: int
    WEIGHT_STRIDE: int
    BLOCK_I: int  # rows of a product, of a token's heads

    @classmethod
    def of(cls, problem: Problem, q: str = "q", k: str = "k", weights: str = "weights") -> "Indexer":
        specs = problem.specs
        return cls(
            HEADS=problem["I"],
            D=problem["D"],
            Q_STRIDE_T=specs[q].stride(0),
            Q_STRIDE_I=specs[q].stride(1),
            K_STRIDE=specs[k].stride(0),
            WEIGHT_STRIDE=specs[weights].stride(0),
            BLOCK_I=head_rows(problem),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns(Constants):
    """Where a token's keys come from: a range, or indices."""

    HAS_ENDS: bool
    HAS_STARTS: bool
    HAS_INDICES: bool
    INDEX_STRIDE: int

    @classmethod
    def of(cls, problem: Problem) -> "Columns":
        return cls(
            HAS_ENDS=problem.has("ends"),
            HAS_STARTS=problem.has("starts"),
            HAS_INDICES=problem.has("indices"),
            INDEX_STRIDE=problem.specs["indices"].stride(0) if problem.has("indices") else 0,
        )

    @classmethod
    def within_ranges(cls) -> "Columns":
        """All keys of ranges with both bounds."""
        return cls(HAS_ENDS=True, HAS_STARTS=True, HAS_INDICES=False, INDEX_STRIDE=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedScores(Constants):
    """Constants of the kernel of scores at indices."""

    INDEXER: Indexer
    COLUMNS: Columns
    BLOCK_N: int  # keys of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(SelectedScores):
    """Constants of the kernel of scores over ranges."""

    KEYS: Keys
    BLOCK_T: int  # tokens of a program
    GROUP: int  # tokens of a product


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresDerivative(SelectedScores):
    """Constants of the kernels of their derivative."""

    DSCORE_STRIDE: int
