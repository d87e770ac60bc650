import numpy as np

from xmla.core.ops.selection.select_topk.reference import reference as select_topk


def reference(
    logits: np.ndarray, ends: np.ndarray, starts: np.ndarray | None = None, *, k: int, granularity: int, newest: int = 1
) -> tuple[np.ndarray]:
    """Reference of `select_blocks`: each row's block values, then `select_topk`."""
    rows, columns = logits.shape
    values = np.full((rows, -(-columns // granularity)), np.nan, np.float32)
    counts = np.zeros(rows, np.int32)
    for row in range(rows):
        start = 0 if starts is None else np.clip(starts[row], 0, columns)
        kept = logits[row, start : max(np.clip(ends[row], 0, columns), start)]
        counts[row] = -(-len(kept) // granularity)
        for block in range(counts[row]):
            numbers = kept[block * granularity : (block + 1) * granularity]
            numbers = numbers[~np.isnan(numbers)]
            if len(numbers):
                values[row, block] = min(numbers.max(), np.finfo(np.float32).max) if newest else numbers.max()
        values[row, max(counts[row] - newest, 0) : counts[row]] = np.inf
    return select_topk(values, counts, k=k)
