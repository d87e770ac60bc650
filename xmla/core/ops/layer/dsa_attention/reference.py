import numpy as np

from xmla.core.formats.indexer import indexer_layouts
from xmla.core.ops.attention.sparse_mla.reference import reference as sparse_mla
from xmla.core.ops.indexer.indexer_logits_paged.reference import reference as indexer_logits_paged
from xmla.core.ops.indexer.quantize_indexer_query.reference import reference as quantize_indexer_query
from xmla.core.ops.selection.select_topk.reference import reference as select_topk
from xmla.core.ops.slots.map_slots.reference import reference as map_slots


def reference(
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
    workspace_bytes: int = 1 << 29,
    batch_invariant: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reference of `dsa_attention`: its ops one after another."""
    (layout,) = indexer_layouts(indexer_cache.shape[2], index_q.shape[2], indexer_cache_format)
    q8, weights = quantize_indexer_query(index_q, index_weights, scale=index_scale, format=layout.query_format)
    (logits,) = indexer_logits_paged(
        q8, weights, indexer_cache, block_table, lengths, request_ids, cache_format=indexer_cache_format
    )
    (indices,) = select_topk(logits.astype(np.float32), lengths, k=k)
    slots, _ = map_slots(indices, block_table, request_ids, page_size=max(mla_cache.shape[1], 1))
    out, lse = sparse_mla(q, mla_cache, slots, sink=sink, softmax_scale=softmax_scale, cache_format=mla_cache_format)
    return out, lse, indices
