"""What kernels that compute attention's target are compiled for: `lang.scores` reads these."""

from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.training.indexer_scores.constants import Ranges
from xmla.core.plan import Constants
from xmla.core.values import next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Constants):
    """Attention's queries, rows and lse."""

    HEADS: int
    DIMS: int
    Q_STRIDE_T: int
    Q_STRIDE_H: int
    ROW_STRIDE: int
    LSE_STRIDE: int
    SCALE: float
    BLOCK_H: int  # rows of a product, of a token's heads

    @classmethod
    def of(cls, problem: Problem) -> "Attention":
        specs = problem.specs
        return cls(
            HEADS=problem["H"],
            DIMS=problem["L+E"],
            Q_STRIDE_T=specs["q"].stride(0),
            Q_STRIDE_H=specs["q"].stride(1),
            ROW_STRIDE=specs["rows"].stride(0),
            LSE_STRIDE=specs["lse"].stride(0),
            SCALE=float(problem.attrs.softmax_scale),
            BLOCK_H=max(16, next_power_of_2(problem["H"])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Constants):
    """Constants of the kernel of the target."""

    ATTENTION: Attention
    COLUMNS: Ranges
    BLOCK_N: int  # keys of a tile
