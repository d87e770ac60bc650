import numpy as np


def reference(
    q8: np.ndarray, weights: np.ndarray, keys: np.ndarray, key_scales: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Definition of `indexer_logits`, in float64."""
    logits = np.full((len(q8), len(keys)), -np.inf)
    for token, (start, end) in enumerate(zip(np.maximum(starts, 0), np.minimum(ends, len(keys)), strict=True)):
        if start < end:
            scores = token_scores(q8[token], weights[token], keys[start:end], key_scales[start:end])
            logits[token, start:end] = scores
    return logits


def token_scores(q8: np.ndarray, weights: np.ndarray, keys: np.ndarray, key_scales: np.ndarray) -> np.ndarray:
    """Logits [N] of one token with queries [I, D] and weights [I] over keys [N, D] with scales [N]."""
    dots = keys.astype(np.float64) @ q8.astype(np.float64).T
    return np.maximum(dots, 0.0) @ weights.astype(np.float64) * key_scales.astype(np.float64)
