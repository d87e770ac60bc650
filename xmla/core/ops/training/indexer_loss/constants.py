"""What kernels of the indexer's loss are compiled for."""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTarget(Target):
    """Constants of the kernel of the target over ranges."""

    TURN: int  # tokens that take a tile of keys one after the other
