import numpy as np

from xmla.core.ops.blocks.indexer_block_logits_paged.reference import positions_of
from xmla.core.ops.blocks.indexer_block_logits_paged.reference import reference as indexer_block_logits_paged
from xmla.core.ops.selection.select_topk.reference import reference as select_topk


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    cache: np.ndarray,
    block_table: np.ndarray,
    lengths: np.ndarray,
    blocks: np.ndarray,
    request_ids: np.ndarray | None = None,
    *,
    k: int,
    granularity: int,
    workspace_bytes: int = 1 << 29,
) -> tuple[np.ndarray]:
    """Reference of `indexer_block_topk_paged`: its two ops one after the other, then the positions of the columns."""
    call = (q8, weights, cache, block_table, lengths, blocks, request_ids)
    logits, widths = indexer_block_logits_paged(*call, granularity=granularity)
    visible = np.clip(lengths, 0, block_table.shape[1] * cache.shape[1])
    return select_positions(logits, widths, blocks, visible, k, granularity)


def select_positions(
    logits: np.ndarray, widths: np.ndarray, blocks: np.ndarray, lengths: np.ndarray, k: int, granularity: int
) -> tuple[np.ndarray]:
    """The positions of the k columns with the largest logits, those without a key left out."""
    (columns,) = select_topk(logits.astype(np.float32), widths, k=k)
    indices = np.full(columns.shape, -1, np.int32)
    for row, position in enumerate(positions_of(blocks, lengths, granularity)):
        found = position[columns[row][columns[row] >= 0]]
        found = found[found >= 0]
        indices[row, : len(found)] = found
    return (indices,)
