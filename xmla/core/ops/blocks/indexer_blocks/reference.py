import numpy as np

from xmla.core.ops.blocks.select_blocks.reference import reference as select_blocks
from xmla.core.ops.indexer.indexer_logits.reference import reference as indexer_logits


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    keys: np.ndarray,
    key_scales: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    *,
    k: int,
    granularity: int,
    newest: int = 1,
    workspace_bytes: int = 1 << 29,
) -> tuple[np.ndarray]:
    """Reference of `indexer_blocks`: its two ops one after the other."""
    (logits,) = indexer_logits(q8, weights, keys, key_scales, starts, ends)
    return select_blocks(logits.astype(np.float32), ends, starts, k=k, granularity=granularity, newest=newest)
