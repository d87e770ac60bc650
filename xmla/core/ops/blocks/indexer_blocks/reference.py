from typing import Any

import numpy as np

from xmla.core.ops.blocks.select_blocks.reference import reference as select_blocks
from xmla.core.ops.indexer.key_source import reference_logits


def reference(
    *, k: int, granularity: int, newest: int = 1, workspace_bytes: int = 1 << 29, **logits_call: Any
) -> tuple[np.ndarray]:
    """Reference of `indexer_blocks`, also over pages: its two ops one after the other."""
    logits, ranges = reference_logits(logits_call)
    return select_blocks(logits.astype(np.float32), **ranges, k=k, granularity=granularity, newest=newest)
