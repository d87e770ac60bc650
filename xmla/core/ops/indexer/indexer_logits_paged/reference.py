import numpy as np

from xmla.core.formats.indexer import indexer_layouts
from xmla.core.ops.indexer.indexer_logits.reference import token_scores


def reference(
    q8: np.ndarray,
    weights: np.ndarray,
    cache: np.ndarray,
    block_table: np.ndarray,
    lengths: np.ndarray,
    request_ids: np.ndarray | None = None,
    *,
    max_len: int | None = None,
    logits_dtype: str = "float32",
    cache_format: str | None = None,
) -> tuple[np.ndarray]:
    """Reference of `indexer_logits_paged`, in float64 whatever `logits_dtype`; NaN where nothing is written."""
    (layout,) = indexer_layouts(cache.shape[2], q8.shape[2], cache_format)
    pages, entries, _ = cache.shape
    requests, width = block_table.shape
    columns = width * entries if max_len is None else max_len
    logits = np.full((len(q8), columns), np.nan)
    for token, length in enumerate(np.clip(lengths, 0, min(columns, width * entries))):
        logits[token, :length] = -np.inf
        request = token // (len(q8) // requests) if request_ids is None else request_ids[token]
        if not 0 <= request < requests:
            continue
        key = np.arange(length)
        page = block_table[request, key // entries].astype(np.int64)
        ok = (page >= 0) & (page < pages)
        values, scales = layout.gather(cache, page[ok] * entries + key[ok] % entries)
        logits[token, key[ok]] = token_scores(q8[token], weights[token], layout, values, scales)
    return (logits,)
