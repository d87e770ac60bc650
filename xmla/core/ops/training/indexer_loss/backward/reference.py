import numpy as np


def reference(
    forward_dindex_q: np.ndarray, forward_dindex_k: np.ndarray, forward_dindex_weights: np.ndarray, dloss: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reference of `indexer_loss_backward`, in float64."""
    scale = dloss.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return forward_dindex_q * scale, forward_dindex_k * scale, forward_dindex_weights * scale
