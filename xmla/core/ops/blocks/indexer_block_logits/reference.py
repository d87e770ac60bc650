import numpy as np

from xmla.core.ops.blocks.indexer_block_logits_paged.reference import take_entries
from xmla.core.ops.indexer.indexer_logits.reference import reference as indexer_logits


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    keys: np.ndarray,
    key_scales: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    blocks: np.ndarray,
    *,
    granularity: int,
    logits_dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `indexer_block_logits`: the logits of all keys, of which the blocks' entries are taken."""
    (dense,) = indexer_logits(q8, weights, keys, key_scales, starts, ends)
    first, length = ranges(starts, ends, len(keys))
    return take_entries(dense, first, length, blocks, granularity)


def ranges(starts: np.ndarray, ends: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """The first key of each token's range, and the number of its keys."""
    first = np.clip(starts, 0, keys)
    return first, np.maximum(np.clip(ends, 0, keys) - first, 0)
