import numpy as np

from xmla.core.ops.indexer.indexer_logits.reference import reference as indexer_logits
from xmla.core.ops.selection.select_topk.reference import reference as select_topk


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    keys: np.ndarray,
    key_scales: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    *,
    k: int,
    workspace_bytes: int = 1 << 29,
) -> tuple[np.ndarray]:
    """Reference of `indexer_topk`: its two ops one after the other."""
    (logits,) = indexer_logits(q8, weights, keys, key_scales, starts, ends)
    return select_topk(logits.astype(np.float32), ends, starts, k=k)
