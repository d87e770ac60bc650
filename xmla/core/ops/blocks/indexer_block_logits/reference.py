from collections.abc import Mapping
from typing import Any

import numpy as np

from xmla.core.ops.indexer.key_source import reference_logits


def reference(
    blocks: np.ndarray, *, granularity: int, logits_dtype: str = "float32", **logits_call: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `indexer_block_logits`, also over pages: the logits of all keys, of which it takes the entries."""
    dense, _ = reference_logits(logits_call)
    first, lengths = ranges(logits_call)
    logits = np.full((len(blocks), blocks.shape[1] * granularity), -np.inf)
    widths = np.zeros(len(blocks), np.int32)
    for row, position in enumerate(positions_of(blocks, lengths, granularity)):
        (column,) = np.nonzero(position >= 0)
        logits[row, column] = dense[row, first[row] + position[column]]
        widths[row] = column.max(initial=-1) + 1
    return logits, widths


def ranges(call: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The first key of each token's range, and the number of its keys, of a call over ragged or paged keys."""
    if "cache" in call:
        lengths = np.clip(call["lengths"], 0, call["block_table"].shape[1] * call["cache"].shape[1])
        return np.zeros_like(lengths), lengths
    keys = len(call["keys"])
    first = np.clip(call["starts"], 0, keys)
    return first, np.maximum(np.clip(call["ends"], 0, keys) - first, 0)


def positions_of(blocks: np.ndarray, lengths: np.ndarray, granularity: int) -> np.ndarray:
    """The position of each column of rows of selected blocks, −1 where there is none below the length."""
    first = np.repeat(blocks.astype(np.int64) * granularity, granularity, axis=1)
    position = first + np.tile(np.arange(granularity), blocks.shape[1])
    return np.where((first >= 0) & (position < lengths[:, None]), position, -1)
