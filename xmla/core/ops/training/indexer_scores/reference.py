from collections.abc import Iterator

import numpy as np


def reference(
    q: np.ndarray,
    k: np.ndarray,
    weights: np.ndarray,
    ends: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    indices: np.ndarray | None = None,
) -> tuple[np.ndarray]:
    """Reference of `indexer_scores`, in float64."""
    scores = np.full((len(q), len(k) if indices is None else indices.shape[1]), -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        for token, columns, keys in valid_columns(len(q), len(k), ends, starts, indices):
            dots = np.maximum(q[token].astype(np.float64) @ k[keys].astype(np.float64).T, 0.0)
            scores[token, columns] = weights[token].astype(np.float64) @ dots
    return (scores,)


def valid_columns(
    tokens: int, count: int, ends: np.ndarray | None, starts: np.ndarray | None, indices: np.ndarray | None
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each token, its columns with a key that it may see, and these keys."""
    for token in range(tokens):
        start = 0 if starts is None else max(int(starts[token]), 0)
        end = count if ends is None else min(int(ends[token]), count)
        key = np.arange(count) if indices is None else indices[token].astype(np.int64)
        (columns,) = np.nonzero((key >= start) & (key < end))
        yield token, columns, key[columns]
