import numpy as np

from xmla.core.ops.blocks.indexer_block_logits.reference import ranges
from xmla.core.ops.blocks.indexer_block_logits.reference import reference as indexer_block_logits
from xmla.core.ops.blocks.indexer_block_topk_paged.reference import select_positions


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    keys: np.ndarray,
    key_scales: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    blocks: np.ndarray,
    *,
    k: int,
    granularity: int,
    workspace_bytes: int = 1 << 29,
) -> tuple[np.ndarray]:
    """Reference of `indexer_block_topk`: its two ops one after the other, then the positions of the columns."""
    call = (q8, weights, keys, key_scales, starts, ends, blocks)
    logits, widths = indexer_block_logits(*call, granularity=granularity)
    return select_positions(logits, widths, blocks, ranges(starts, ends, len(keys))[1], k, granularity)
