import numpy as np

from xmla.core.formats.mla import mla_layouts
from xmla.core.values import DTYPES, Spec


def reference(
    cache: np.ndarray, slots: np.ndarray, *, cache_format: str | None = None, dtype: str = "bfloat16"
) -> tuple[np.ndarray]:
    """Reference of `read_mla_cache`."""
    (layout,) = mla_layouts(Spec.of_numpy(cache), cache_format)
    rows = np.zeros((len(slots), layout.dims), DTYPES[dtype][0])
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    rows[valid] = layout.gather(cache, slots[valid]).astype(rows.dtype)
    return (rows,)
