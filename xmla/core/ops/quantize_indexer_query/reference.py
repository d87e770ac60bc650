import numpy as np

from xmla.core.layout import IndexerLayout, quantize


def reference(q: np.ndarray, weights: np.ndarray, *, scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Definition of `quantize_indexer_query`."""
    heads, dim = q.shape[1:]
    factor = scale if scale is not None else (dim * heads) ** -0.5
    q8, scales = quantize(q, IndexerLayout(dim).min_exponent)
    return q8, (weights.astype(np.float64) * scales * factor).astype(np.float32)
