import numpy as np

from xmla.core.ops.indexer.indexer_logits_paged.reference import reference as indexer_logits_paged
from xmla.core.ops.selection.select_topk.reference import reference as select_topk


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    cache: np.ndarray,
    block_table: np.ndarray,
    lengths: np.ndarray,
    request_ids: np.ndarray | None = None,
    *,
    k: int,
    workspace_bytes: int = 1 << 29,
) -> tuple[np.ndarray]:
    """Reference of `indexer_topk_paged`: its two ops one after the other."""
    (logits,) = indexer_logits_paged(q8, weights, cache, block_table, lengths, request_ids)
    return select_topk(logits.astype(np.float32), lengths, k=k)
