import numpy as np

from xmla.core.ops.blocks.select_blocks.reference import reference as select_blocks
from xmla.core.ops.indexer.indexer_logits_paged.reference import reference as indexer_logits_paged


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    cache: np.ndarray,
    block_table: np.ndarray,
    lengths: np.ndarray,
    request_ids: np.ndarray | None = None,
    *,
    k: int,
    granularity: int,
    newest: int = 1,
    workspace_bytes: int = 1 << 29,
) -> tuple[np.ndarray]:
    """Reference of `indexer_blocks_paged`: its two ops one after the other."""
    (logits,) = indexer_logits_paged(q8, weights, cache, block_table, lengths, request_ids)
    return select_blocks(logits.astype(np.float32), lengths, k=k, granularity=granularity, newest=newest)
