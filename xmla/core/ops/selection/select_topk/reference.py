import numpy as np


def reference(logits: np.ndarray, ends: np.ndarray, starts: np.ndarray | None = None, *, k: int) -> tuple[np.ndarray]:
    """Reference of `select_topk`."""
    rows, columns = logits.shape
    indices = np.full((rows, k), -1, np.int32)
    for row in range(rows):
        start = 0 if starts is None else np.clip(starts[row], 0, columns)
        values = logits[row, start : max(np.clip(ends[row], 0, columns), start)].astype(np.float32)
        # Python orders −0.0 and 0.0 alike; NaN goes last; the sort is stable, so ties keep ascending columns.
        order = np.lexsort((np.nan_to_num(-values, nan=0.0, posinf=np.inf, neginf=-np.inf), np.isnan(values)))
        chosen = np.sort(order[:k])
        indices[row, : len(chosen)] = chosen
    return (indices,)
