import numpy as np


def reference(
    outs: np.ndarray, lses: np.ndarray, sink: np.ndarray | None = None, *, empty_lse: str = "-inf"
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `merge_attention`, in float64."""
    weights = np.where(np.isposinf(lses), -np.inf, lses.astype(np.float64))  # [W, T, H]
    empty = np.isneginf(weights)
    lse = np.logaddexp.reduce(weights, axis=0)
    whole = lse if sink is None else np.logaddexp(lse, sink.astype(np.float64))
    share = np.exp(np.where(empty, -np.inf, weights - np.where(np.isneginf(whole), 0.0, whole)))
    values = np.where(empty[..., None], 0.0, outs.astype(np.float64))
    out = np.where(np.isneginf(lse)[..., None], 0.0, (share[..., None] * values).sum(axis=0))
    return out, np.where(np.isneginf(lse), np.inf if empty_lse == "+inf" else -np.inf, lse)
