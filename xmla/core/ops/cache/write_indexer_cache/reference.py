import numpy as np

from xmla.core.formats.indexer import indexer_layouts


def reference(keys: np.ndarray, slots: np.ndarray, cache: np.ndarray, *, cache_format: str | None = None) -> tuple[()]:
    """Reference of `write_indexer_cache`; updates `cache` in place."""
    (layout,) = indexer_layouts(cache.shape[2], keys.shape[1], cache_format)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    layout.scatter(cache, slots[valid], *layout.quantize(keys[valid]))
    return ()
