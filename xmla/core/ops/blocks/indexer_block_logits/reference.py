from collections.abc import Mapping

import numpy as np

from xmla.core.ops.indexer.key_source import reference_logits


def reference(
    blocks: np.ndarray, *, granularity: int, logits_dtype: str = "float32", **arrays: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `indexer_block_logits`, also over pages: the logits of all keys, of which it takes the entries."""
    dense, _ = reference_logits(arrays)
    first, lengths = ranges(arrays)
    logits = np.full((len(blocks), blocks.shape[1] * granularity), -np.inf)
    widths = np.zeros(len(blocks), np.int32)
    for row, position in enumerate(positions_of(blocks, lengths, granularity)):
        (column,) = np.nonzero(position >= 0)
        logits[row, column] = dense[row, first[row] + position[column]]
        widths[row] = column.max(initial=-1) + 1
    return logits, widths


def ranges(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The first key of each token's range, and the number of its keys, of a call over ragged or paged keys."""
    if "cache" in arrays:
        lengths = np.clip(arrays["lengths"], 0, arrays["block_table"].shape[1] * arrays["cache"].shape[1])
        return np.zeros_like(lengths), lengths
    keys = len(arrays["keys"])
    first = np.clip(arrays["starts"], 0, keys)
    return first, np.maximum(np.clip(arrays["ends"], 0, keys) - first, 0)


def positions_of(blocks: np.ndarray, lengths: np.ndarray, granularity: int) -> np.ndarray:
    """The position of each column of rows of selected blocks, −1 where there is none below the length."""
    first = np.repeat(blocks.astype(np.int64) * granularity, granularity, axis=1)
    position = first + np.tile(np.arange(granularity), blocks.shape[1])
    return np.where((first >= 0) & (position < lengths[:, None]), position, -1)
