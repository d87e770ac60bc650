import numpy as np

from xmla.core.ops.attention.sparse_mla.reference import reference as sparse_mla
from xmla.core.ops.slots.map_slots.reference import reference as map_slots


def reference(
    q: np.ndarray,
    cache: np.ndarray,
    indices: np.ndarray,
    block_table: np.ndarray,
    lengths: np.ndarray,
    request_ids: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    *,
    softmax_scale: float,
    cache_format: str | None = None,
    batch_invariant: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `sparse_mla_paged`: its two ops one after the other."""
    slots, _ = map_slots(indices, block_table, request_ids, lengths, page_size=max(cache.shape[1], 1))
    return sparse_mla(q, cache, slots, sink=sink, softmax_scale=softmax_scale, cache_format=cache_format)
