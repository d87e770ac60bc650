import numpy as np

from xmla.core.ops.training.indexer_scores.backward.reference import Gradients
from xmla.core.ops.training.indexer_scores.reference import valid_columns
from xmla.core.ops.training.indexer_target.reference import token_target

LEAST = 1e-10  # of the target inside its logarithm


def reference(
    index_q: np.ndarray,
    index_k: np.ndarray,
    index_weights: np.ndarray,
    q: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    ends: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    indices: np.ndarray | None = None,
    target: np.ndarray | None = None,
    *,
    softmax_scale: float | None = None,
    coeff: float = 1.0,
    workspace_bytes: int = 1 << 29,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reference of `indexer_loss`, in float64."""
    tokens = len(index_q)
    gradients = Gradients(index_q, index_k, index_weights)
    loss = np.zeros(1)
    with np.errstate(invalid="ignore", over="ignore"):
        for token, columns, keys in valid_columns(tokens, len(index_k), ends, starts, indices):
            if target is not None:
                wanted = target[token, columns].astype(np.float64)
            else:
                assert q is not None and rows is not None and lse is not None  # checked by bind
                assert softmax_scale is not None  # checked by bind
                wanted = token_target(q[token], rows[keys], lse[token], softmax_scale)
            if wanted.sum() == 0:
                continue
            wanted = wanted / wanted.sum()
            dots = np.maximum(gradients.q[token] @ gradients.k[keys].T, 0.0)
            scores = gradients.weights[token] @ dots
            log_prediction = scores - scores.max()
            log_prediction -= np.log(np.exp(log_prediction).sum())
            log_ratio = np.log(np.maximum(wanted, LEAST)) - log_prediction
            loss += np.where(wanted == 0, 0.0, wanted * log_ratio).sum() * coeff / tokens
            apart = np.exp(log_prediction) - wanted
            gradients.add(token, keys, apart * coeff / tokens, np.abs(apart) <= 2)
    return loss, *gradients.results()
