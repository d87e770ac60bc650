import numpy as np

from xmla.core.ops.training.compress_rows.reference import turned, weigh, windows


def reference(
    kv: np.ndarray,
    score: np.ndarray,
    ape: np.ndarray,
    positions: np.ndarray,
    drows: np.ndarray,
    norm_weight: np.ndarray | None = None,
    cos_sin: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reference of `compress_rows_backward`: one entry at a time, in float64."""
    dim = kv.shape[1] if norm_weight is None else len(norm_weight)
    dkv, dscore, dape = np.zeros(kv.shape), np.zeros(kv.shape), np.zeros(ape.shape)
    dweight = np.zeros(0 if norm_weight is None else dim)
    for token, tokens, columns in windows(kv, ape, positions, cos_sin, dim):
        values, weights = weigh(kv, score, ape, positions, tokens, columns)
        pooled, dpooled = (weights * values).sum(axis=0), drows[token].astype(np.float64)
        if cos_sin is not None:
            dpooled = turned(dpooled, cos_sin[positions[token] + 1 - len(ape)], back=True)
        if norm_weight is not None:
            scale = 1 / np.sqrt((pooled**2).mean() + eps)
            dweight += dpooled * pooled * scale
            dpooled = dpooled * norm_weight.astype(np.float64)
            dpooled = scale * (dpooled - pooled * scale**2 * (dpooled * pooled).mean())
        dkv[tokens, columns] = weights * dpooled
        dscore[tokens, columns] = weights * dpooled * (values - pooled)
        np.add.at(dape, (positions[tokens] % len(ape), columns), dscore[tokens, columns])
    return dkv, dscore, dape, dweight
