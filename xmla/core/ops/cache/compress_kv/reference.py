import numpy as np

from xmla.core.formats.indexer import indexer_layouts
from xmla.core.formats.mla import mla_layouts
from xmla.core.values import Spec


def reference(
    kv: np.ndarray,
    score: np.ndarray,
    ape: np.ndarray,
    norm_weight: np.ndarray,
    cos_sin: np.ndarray,
    positions: np.ndarray,
    state: np.ndarray,
    state_table: np.ndarray,
    cache: np.ndarray,
    block_table: np.ndarray,
    request_ids: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
    cache_format: str | None = None,
    scale_floor: str = "amax",
    hadamard: bool = False,
) -> tuple[()]:
    """Reference of `compress_kv`: one token at a time, pooled in float64; updates `state` and `cache` in place."""
    ratio, dim = len(ape), len(norm_weight)
    slots, entries = [], []
    for slot, entry, rows in windows(
        kv, score, ape, positions, state, state_table, cache, block_table, request_ids, dim
    ):
        if entry * ratio < len(cos_sin):
            slots.append(slot)
            entries.append(_entry(pool(rows), norm_weight.astype(np.float64), cos_sin[entry * ratio], eps))
    if not entries:
        return ()
    values = np.stack(entries)
    values = (values @ sylvester(dim) / np.sqrt(dim) if hadamard else values).astype(np.float32)
    if dim != 512:
        (keys,) = indexer_layouts(cache.shape[2], dim, cache_format)
        keys.scatter(cache, np.array(slots), *keys.quantize(values))
    else:
        (mla,) = mla_layouts(Spec.of_numpy(cache), cache_format)
        mla.scatter(cache, np.array(slots), values[:, : mla.latent], values[:, mla.latent :], scale_floor)
    return ()


def windows(
    kv: np.ndarray, score: np.ndarray, ape: np.ndarray, positions: np.ndarray, state: np.ndarray,
    state_table: np.ndarray, cache: np.ndarray, block_table: np.ndarray, request_ids: np.ndarray | None, dim: int,
) -> list[tuple[int, int, np.ndarray]]:  # fmt: skip
    """Store the tokens' states; the slot and number of each entry that they complete, and its window's states.

    These are rows [rows, 2, D] of kv and score, in float64.
    """
    tokens, (ratio, width) = len(kv), ape.shape
    overlap = width // dim - 1

    def place(table: np.ndarray, request: int, index: int, pool: np.ndarray) -> tuple[int, int] | None:
        """Page and offset of a position or entry, if it has a page."""
        column, offset = divmod(index, max(pool.shape[1], 1))
        if not pool.size or index < 0 or column >= table.shape[1] or not 0 <= table[request, column] < len(pool):
            return None
        return int(table[request, column]), offset

    owners = np.arange(tokens) // max(tokens // max(len(block_table), 1), 1) if request_ids is None else request_ids
    known = [(token, int(owner), int(positions[token])) for token, owner in enumerate(owners)
             if 0 <= owner < len(block_table) and positions[token] >= 0]  # fmt: skip
    for token, owner, position in known:
        if (at := place(state_table, owner, position, state)) is not None:
            state[at] = np.concatenate([kv[token].astype(np.float32),
                                        score[token].astype(np.float32) + ape[position % ratio]])  # fmt: skip

    found = []
    for _, owner, position in known:
        entry, last = divmod(position, ratio)
        at = place(block_table, owner, entry, cache)
        if last != ratio - 1 or at is None:
            continue
        rows = []
        for past in range((entry - overlap) * ratio, (entry + 1) * ratio):
            if (kept := place(state_table, owner, past, state)) is not None:
                series = overlap if past >= entry * ratio else 0
                rows.append(state[kept].reshape(2, -1, dim)[:, series].astype(np.float64))
        if rows:
            found.append((at[0] * cache.shape[1] + at[1], entry, np.stack(rows)))
    return found


def pool(rows: np.ndarray) -> np.ndarray:
    """Σ softmax(score) · kv [D] over the rows [rows, 2, D] of a window, each dim separately."""
    kv, score = rows[:, 0], rows[:, 1]
    weights = np.exp(score - score.max(axis=0))
    return (weights * kv).sum(axis=0) / weights.sum(axis=0)


def sylvester(dim: int) -> np.ndarray:
    """The Hadamard matrix [dim, dim] of Sylvester's construction."""
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix


def _entry(pooled: np.ndarray, norm_weight: np.ndarray, cos_sin: np.ndarray, eps: float) -> np.ndarray:
    """One entry [D] from what its window pools."""
    normed = pooled / np.sqrt((pooled**2).mean() + eps) * norm_weight
    cos, sin = np.split(cos_sin.astype(np.float64), 2)
    roped = normed[len(normed) - len(cos_sin) :]
    even, odd = roped[::2].copy(), roped[1::2].copy()
    roped[::2], roped[1::2] = even * cos - odd * sin, even * sin + odd * cos
    return normed
