import numpy as np


def reference(values: np.ndarray, indices: np.ndarray, *, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `merge_topk`."""
    _, rows, _ = values.shape
    top_values = np.full((rows, k), -np.inf, np.float32)
    top_indices = np.full((rows, k), -1, np.int32)
    for row in range(rows):
        valid = indices[:, row] >= 0
        value, index = values[:, row][valid], indices[:, row][valid]
        order = np.lexsort((index, np.nan_to_num(-value, nan=0.0, posinf=np.inf, neginf=-np.inf), np.isnan(value)))
        chosen = np.sort(order[:k])
        chosen = chosen[np.argsort(index[chosen], kind="stable")]
        top_values[row, : len(chosen)] = value[chosen]
        top_indices[row, : len(chosen)] = index[chosen]
    return top_values, top_indices
