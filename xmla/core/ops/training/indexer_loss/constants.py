"""What kernels of the indexer's loss are compiled for."""

from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.training.indexer_scores.constants import Columns, Indexer
from xmla.core.ops.training.indexer_target.constants import Target
from xmla.core.plan import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Constants):
    """Constants of all passes over a token's keys."""

    INDEXER: Indexer
    COLUMNS: Columns
    TARGET_STRIDE: int  # with indices
    COEFF: float
    BLOCK_N: int  # keys of a tile

    @classmethod
    def of(cls, problem: Problem, block_n: int) -> "Loss":
        selected = problem["K"] if problem.has("indices") else 0
        return cls(
            INDEXER=Indexer.of(problem, "index_q", "index_k", "index_weights"),
            COLUMNS=Columns.of(problem),
            TARGET_STRIDE=problem.specs["target"].stride(0) if problem.has("target") else selected,
            COEFF=float(problem.attrs.coeff),
            BLOCK_N=block_n,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTarget(Target):
    """Constants of the kernel of the target over ranges."""

    TURN: int  # tokens that take a tile of keys one after the other
