import numpy as np

from xmla.core.formats.indexer import indexer_pairs


def reference(
    source: np.ndarray,
    source_slots: np.ndarray,
    slots: np.ndarray,
    cache: np.ndarray,
    *,
    source_format: str | None = None,
    cache_format: str | None = None,
) -> tuple[()]:
    """Reference of `convert_indexer_cache`; updates `cache` in place."""
    ((origin, layout),) = indexer_pairs(source.shape[2], cache.shape[2], source_format, cache_format)
    valid = (source_slots >= 0) & (source_slots < source.shape[0] * source.shape[1])
    valid &= (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    values, factors = origin.operands(*origin.gather(source, source_slots[valid]))
    keys = (values * factors[:, None]).astype(np.float32)
    layout.scatter(cache, slots[valid], *layout.quantize(keys))
    return ()
