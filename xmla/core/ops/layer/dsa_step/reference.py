import numpy as np

from xmla.core.ops.cache.write_indexer_cache.reference import reference as write_indexer_cache
from xmla.core.ops.cache.write_mla_cache.reference import reference as write_mla_cache
from xmla.core.ops.layer.dsa_attention.reference import reference as dsa_attention


def reference(
    latent: np.ndarray,
    rope: np.ndarray,
    index_k: np.ndarray,
    entry_slots: np.ndarray,
    q: np.ndarray,
    index_q: np.ndarray,
    index_weights: np.ndarray,
    mla_cache: np.ndarray,
    indexer_cache: np.ndarray,
    block_table: np.ndarray,
    lengths: np.ndarray,
    request_ids: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    *,
    k: int,
    softmax_scale: float,
    index_scale: float | None = None,
    mla_cache_format: str | None = None,
    indexer_cache_format: str | None = None,
    scale_floor: str = "scale",
    workspace_bytes: int = 1 << 29,
    batch_invariant: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reference of `dsa_step`: its three ops one after another; updates both caches in place."""
    write_mla_cache(latent, rope, entry_slots, mla_cache, cache_format=mla_cache_format, scale_floor=scale_floor)
    write_indexer_cache(index_k, entry_slots, indexer_cache, cache_format=indexer_cache_format)
    return dsa_attention(
        q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, request_ids, sink, k=k,
        softmax_scale=softmax_scale, index_scale=index_scale, mla_cache_format=mla_cache_format,
        indexer_cache_format=indexer_cache_format,
    )  # fmt: skip
