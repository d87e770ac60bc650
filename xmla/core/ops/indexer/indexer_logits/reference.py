import numpy as np

from xmla.core.formats.indexer import IndexerLayout


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    keys: np.ndarray,
    key_scales: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    *,
    logits_dtype: str = "float32",
) -> tuple[np.ndarray]:
    """Reference of `indexer_logits`, in float64 whatever `logits_dtype`."""
    scaled = "mxfp4" if keys.shape[1] < q8.shape[2] else "fp8_ue8m0"
    layout = IndexerLayout(q8.shape[2], scaled if key_scales.dtype == np.int32 else "fp8")
    logits = np.full((len(q8), len(keys)), -np.inf)
    for token, (start, end) in enumerate(zip(np.maximum(starts, 0), np.minimum(ends, len(keys)), strict=True)):
        if start < end:
            scores = token_scores(q8[token], weights[token], layout, keys[start:end], key_scales[start:end])
            logits[token, start:end] = scores
    return (logits,)


def token_scores(
    q8: np.ndarray, weights: np.ndarray, layout: IndexerLayout, values: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """Logits [N] of one token with queries [I, D] and weights [I] over stored keys [N, …] with scales [N]."""
    keys, factors = layout.operands(values, scales)
    dots = keys @ q8.astype(np.float64).T
    return np.maximum(dots, 0.0) @ weights.astype(np.float64) * factors
