import numpy as np

from xmla.core.ops.indexer.indexer_logits_paged.reference import reference as indexer_logits_paged


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    cache: np.ndarray,
    block_table: np.ndarray,
    lengths: np.ndarray,
    blocks: np.ndarray,
    request_ids: np.ndarray | None = None,
    *,
    granularity: int,
    logits_dtype: str = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `indexer_block_logits_paged`: the logits of all keys, of which the blocks' entries are taken."""
    (dense,) = indexer_logits_paged(q8, weights, cache, block_table, lengths, request_ids)
    visible = np.clip(lengths, 0, dense.shape[1])
    return take_entries(dense, np.zeros_like(visible), visible, blocks, granularity)


def take_entries(
    dense: np.ndarray, starts: np.ndarray, lengths: np.ndarray, blocks: np.ndarray, granularity: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the blocks' entries, of rows over all keys, −inf elsewhere, and the columns up to the last entry."""
    logits = np.full((len(blocks), blocks.shape[1] * granularity), -np.inf)
    widths = np.zeros(len(blocks), np.int32)
    for row, position in enumerate(positions_of(blocks, lengths, granularity)):
        (column,) = np.nonzero(position >= 0)
        logits[row, column] = dense[row, starts[row] + position[column]]
        widths[row] = column.max(initial=-1) + 1
    return logits, widths


def positions_of(blocks: np.ndarray, lengths: np.ndarray, granularity: int) -> np.ndarray:
    """The position of each column of rows of selected blocks, −1 where there is none below the length."""
    first = np.repeat(blocks.astype(np.int64) * granularity, granularity, axis=1)
    position = first + np.tile(np.arange(granularity), blocks.shape[1])
    return np.where((first >= 0) & (position < lengths[:, None]), position, -1)
