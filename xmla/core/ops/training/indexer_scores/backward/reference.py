import numpy as np

from xmla.core.ops.training.indexer_scores.reference import valid_columns


def reference(
    q: np.ndarray,
    k: np.ndarray,
    weights: np.ndarray,
    dscores: np.ndarray,
    ends: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    indices: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reference of `indexer_scores_backward`, in float64."""
    gradients = Gradients(q, k, weights)
    with np.errstate(invalid="ignore", over="ignore"):
        for token, columns, keys in valid_columns(len(q), len(k), ends, starts, indices):
            upstream = dscores[token, columns].astype(np.float64)
            gradients.add(token, keys, upstream, np.isfinite(upstream))
    return gradients.results()


class Gradients:
    """The gradients of queries, keys and weights, in float64, of those of the scores."""

    def __init__(self, q: np.ndarray, k: np.ndarray, weights: np.ndarray) -> None:
        self.q, self.k, self.weights = (x.astype(np.float64) for x in (q, k, weights))
        self.dq, self.dk, self.dweights = (np.zeros(x.shape) for x in (q, k, weights))

    def add(self, token: int, keys: np.ndarray, dscores: np.ndarray, right: np.ndarray) -> None:
        """Add the part of a token, whose scores over `keys` have gradients `dscores`, NaN for keys not `right`."""
        q, k, weights = self.q[token], self.k[keys], self.weights[token]
        dots = np.maximum(q @ k.T, 0.0)
        ddots = np.where(dots == 0, 0.0, dscores * weights[:, None])
        self.dq[token] = ddots @ k
        self.dweights[token] = (dots * dscores).sum(axis=1)
        dk = ddots.T @ q
        dk[~(right & np.isfinite(q).all() & np.isfinite(weights).all())] = np.nan
        np.add.at(self.dk, keys, dk)

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.dq, self.dk, self.dweights
