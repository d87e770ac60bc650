from typing import Any

import numpy as np

from xmla.core.ops.indexer.key_source import reference_logits
from xmla.core.ops.selection.select_topk.reference import reference as select_topk


def reference(*, k: int, workspace_bytes: int = 1 << 29, **logits_call: Any) -> tuple[np.ndarray]:
    """Reference of `indexer_topk`, also over pages: its two ops one after the other."""
    logits, ranges = reference_logits(logits_call)
    return select_topk(logits.astype(np.float32), **ranges, k=k)
