from typing import Any

import numpy as np

from xmla.core.ops.blocks.indexer_block_logits.reference import positions_of, ranges
from xmla.core.ops.blocks.indexer_block_logits.reference import reference as indexer_block_logits
from xmla.core.ops.selection.select_topk.reference import reference as select_topk


def reference(
    blocks: np.ndarray, *, k: int, granularity: int, workspace_bytes: int = 1 << 29, **logits_call: Any
) -> tuple[np.ndarray]:
    """Reference of `indexer_block_topk`, also over pages: its two ops one after the other, then the positions."""
    logits, widths = indexer_block_logits(blocks, granularity=granularity, logits_dtype="float32", **logits_call)
    (columns,) = select_topk(logits.astype(np.float32), widths, k=k)
    indices = np.full(columns.shape, -1, np.int32)
    _, lengths = ranges(logits_call)
    for row, position in enumerate(positions_of(blocks, lengths, granularity)):
        found = position[columns[row][columns[row] >= 0]]
        found = found[found >= 0]
        indices[row, : len(found)] = found
    return (indices,)
