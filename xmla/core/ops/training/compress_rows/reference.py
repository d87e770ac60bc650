from collections.abc import Iterator

import numpy as np


def reference(
    kv: np.ndarray,
    score: np.ndarray,
    ape: np.ndarray,
    positions: np.ndarray,
    norm_weight: np.ndarray | None = None,
    cos_sin: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[np.ndarray]:
    """Reference of `compress_rows`: one entry at a time, in float64."""
    dim = kv.shape[1] if norm_weight is None else len(norm_weight)
    rows = np.zeros((len(kv), dim))
    for token, tokens, columns in windows(kv, ape, positions, cos_sin, dim):
        values, weights = weigh(kv, score, ape, positions, tokens, columns)
        row = (weights * values).sum(axis=0)
        if norm_weight is not None:
            row = row / np.sqrt((row**2).mean() + eps) * norm_weight.astype(np.float64)
        rows[token] = row if cos_sin is None else turned(row, cos_sin[positions[token] + 1 - len(ape)])
    return (rows,)


def windows(
    kv: np.ndarray, ape: np.ndarray, positions: np.ndarray, cos_sin: np.ndarray | None, dim: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each entry: the token that completes it, its window's tokens [rows, 1], and their columns of kv [rows, D]."""
    ratio, width = ape.shape
    series = width // dim
    for token, position in enumerate(positions.tolist()):
        first = position + 1 - ratio
        if position < 0 or (position + 1) % ratio or (cos_sin is not None and first >= len(cos_sin)):
            continue
        before = np.arange(series * ratio)[::-1]
        place = np.arange(series * ratio) // ratio
        there = (before <= min(position, token)) & (positions[np.maximum(token - before, 0)] == position - before)
        yield token, (token - before[there])[:, None], place[there, None] * dim + np.arange(dim)


def weigh(
    kv: np.ndarray, score: np.ndarray, ape: np.ndarray, positions: np.ndarray, tokens: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A window's kv and their weights, [rows, D] each."""
    scores = score[tokens, columns].astype(np.float64) + ape[positions[tokens] % len(ape), columns]
    weights = np.exp(scores - scores.max(axis=0))
    return kv[tokens, columns].astype(np.float64), weights / weights.sum(axis=0)


def turned(row: np.ndarray, cos_sin: np.ndarray, back: bool = False) -> np.ndarray:
    """A row whose last dims are rotated, or rotated back."""
    cos, sin = np.split(cos_sin.astype(np.float64), 2)
    sin = -sin if back else sin
    row = row.copy()
    roped = row[len(row) - len(cos_sin) :]
    even, odd = roped[::2].copy(), roped[1::2].copy()
    roped[::2], roped[1::2] = even * cos - odd * sin, even * sin + odd * cos
    return row
