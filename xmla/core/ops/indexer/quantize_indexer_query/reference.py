import ml_dtypes
import numpy as np

from xmla.core.formats.indexer import IndexerLayout


def reference(
    q: np.ndarray, weights: np.ndarray, *, scale: float | None = None, format: str = "fp8"
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `quantize_indexer_query`."""
    heads, dim = q.shape[1:]
    factor = scale if scale is not None else max(dim * heads, 1) ** -0.5
    layout = IndexerLayout(dim, format)
    values, scales = layout.quantize(q)
    if format == "mxfp4":
        exact, _ = layout.operands(values, scales)
        return exact.astype(ml_dtypes.bfloat16), (weights.astype(np.float64) * factor).astype(np.float32)
    return values, (weights.astype(np.float64) * scales * factor).astype(np.float32)
