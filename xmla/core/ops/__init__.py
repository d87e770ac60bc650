"""One folder an op. `xmla.core.op.registry` finds them; the front-ends name them."""

from xmla.core.ops import (
    convert_mla_cache,
    dsa_attention,
    indexer_logits,
    indexer_logits_paged,
    indexer_topk,
    indexer_topk_paged,
    map_slots,
    quantize_indexer_query,
    read_indexer_cache,
    read_mla_cache,
    select_topk,
    sparse_mla,
    split_batch,
    window_slots,
    write_indexer_cache,
    write_mla_cache,
)

__all__ = [
    "convert_mla_cache",
    "dsa_attention",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_topk",
    "indexer_topk_paged",
    "map_slots",
    "quantize_indexer_query",
    "read_indexer_cache",
    "read_mla_cache",
    "select_topk",
    "sparse_mla",
    "split_batch",
    "window_slots",
    "write_indexer_cache",
    "write_mla_cache",
]
