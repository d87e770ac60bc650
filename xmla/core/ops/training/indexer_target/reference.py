import numpy as np

from xmla.core.ops.training.indexer_scores.reference import valid_columns


def reference(
    q: np.ndarray,
    rows: np.ndarray,
    lse: np.ndarray,
    indices: np.ndarray,
    ends: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    *,
    softmax_scale: float,
) -> tuple[np.ndarray]:
    """Reference of `indexer_target`, in float64."""
    target = np.zeros(indices.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for token, columns, keys in valid_columns(len(q), len(rows), ends, starts, indices):
            target[token, columns] = token_target(q[token], rows[keys], lse[token], softmax_scale)
    return (target,)


def token_target(q: np.ndarray, rows: np.ndarray, lse: np.ndarray, softmax_scale: float) -> np.ndarray:
    """Σ_h exp(scale · q_h · row − lse_h) of a token with queries [H, L+E] over rows [keys, L+E]."""
    used = ~np.isinf(lse)
    scores = softmax_scale * (q[used].astype(np.float64) @ rows.astype(np.float64).T)
    return np.exp(scores - lse[used].astype(np.float64)[:, None]).sum(axis=0)
