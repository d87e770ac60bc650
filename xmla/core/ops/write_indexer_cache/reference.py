import numpy as np

from xmla.core.layout import IndexerLayout, quantize


def reference(keys: np.ndarray, slots: np.ndarray, cache: np.ndarray) -> None:
    """Definition of `write_indexer_cache`; updates `cache` in place."""
    layout = IndexerLayout(keys.shape[1])
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    layout.scatter(cache, slots[valid], *quantize(keys[valid], layout.min_exponent))
