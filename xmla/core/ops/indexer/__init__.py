"""The lightning indexer: quantized queries, logits of keys, the top k of them.

Keys are a ragged batch's rows, or lie in pages of a cache (`…_paged`).
"""

from xmla.core.ops.indexer import (
    indexer_logits,
    indexer_logits_paged,
    indexer_topk,
    indexer_topk_paged,
    quantize_indexer_query,
)

OPS = (indexer_topk_paged.OP, indexer_topk.OP, indexer_logits_paged.OP, indexer_logits.OP, quantize_indexer_query.OP)
