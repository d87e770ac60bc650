"""What kernels of the indexer's loss are compiled for."""

from dataclasses import dataclass

from xmla.core.ops.indexer_scores.constants import Columns, Indexer
from xmla.core.ops.indexer_target.constants import Attention
from xmla.core.plan import Constants


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Constants):
    """Constants of both passes over a token's keys."""

    INDEXER: Indexer
    COLUMNS: Columns
    ATTENTION: Attention | None  # of which the target is computed; None: it is stored
    TARGET_STRIDE: int
    COEFF: float
    BLOCK_N: int  # keys of a tile
