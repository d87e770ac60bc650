import ml_dtypes
import numpy as np

from xmla.core.layout import IndexerLayout


def reference(cache: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Definition of `read_indexer_cache`."""
    layout = IndexerLayout(cache.shape[2] - 4)
    keys = np.zeros((len(slots), layout.dim), ml_dtypes.float8_e4m3fn)
    scales = np.zeros(len(slots), np.float32)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    keys[valid], scales[valid] = layout.gather(cache, slots[valid])
    return keys, scales
