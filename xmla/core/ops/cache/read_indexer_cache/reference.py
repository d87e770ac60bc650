import numpy as np

from xmla.core.formats.indexer import indexer_layouts
from xmla.core.values import DTYPES


def reference(
    cache: np.ndarray, slots: np.ndarray, *, cache_format: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Reference of `read_indexer_cache`."""
    (layout,) = indexer_layouts(cache.shape[2], form=cache_format)
    value_dtype, scale_dtype = (DTYPES[name][0] for name in layout.dtypes)
    keys = np.zeros((len(slots), layout.value_bytes), value_dtype)
    scales = np.zeros(len(slots), scale_dtype)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    keys[valid], scales[valid] = layout.gather(cache, slots[valid])
    return keys, scales
