import numpy as np

from xmla.core.layout import V32
from xmla.core.spec import DTYPES


def reference(cache: np.ndarray, slots: np.ndarray, *, dtype: str = "bfloat16") -> np.ndarray:
    """Definition of `read_mla_cache`."""
    pages, entries, _ = cache.shape
    rows = np.zeros((len(slots), V32.latent + V32.rope), DTYPES[dtype][0])
    valid = (slots >= 0) & (slots < pages * entries)
    page, offset = np.divmod(slots[valid], entries)
    rows[valid] = V32.read(cache[page, offset]).astype(rows.dtype)
    return rows
