import numpy as np

from xmla.core.formats.indexer import indexer_layouts
from xmla.core.ops.cache.compress_kv.reference import pool, windows


def reference(
    keys: np.ndarray,
    gates: np.ndarray,
    ape: np.ndarray,
    positions: np.ndarray,
    state: np.ndarray,
    state_table: np.ndarray,
    cache: np.ndarray,
    block_table: np.ndarray,
    request_ids: np.ndarray | None = None,
    *,
    cache_format: str | None = None,
) -> tuple[()]:
    """Reference of `pool_keys`: one pool at a time in float64; updates `state` and `cache` in place."""
    dim = keys.shape[1]
    (layout,) = indexer_layouts(cache.shape[2], dim, cache_format)
    for slot, _, rows in windows(
        keys, gates, ape, positions, state, state_table, cache, block_table, request_ids, dim
    ):  # fmt: skip
        layout.scatter(cache, np.array([slot]), *layout.quantize(pool(rows).astype(np.float32)[None]))
    return ()
