"""Formats of the paged caches: the only place that knows an offset.

An entry's slot is `page * R + offset`. Page strides are free; within a page every format is dense.
"""

import numpy as np

from xmla.core.formats.indexer import IndexerLayout, indexer_layouts
from xmla.core.formats.mla import MlaLayout, mla_layouts
from xmla.core.values import Spec

Format = MlaLayout | IndexerLayout


def stored_values(cache: np.ndarray, dim: int, name: str | None = None) -> np.ndarray:
    """The values of every entry of `cache`, float32 [P·R, D]: entries are compared by value, not by bytes."""
    slots = np.arange(cache.shape[0] * cache.shape[1])
    if dim == 512:
        (layout,) = mla_layouts(Spec.of_numpy(cache), name)
        return layout.gather(cache, slots)
    (keys,) = indexer_layouts(cache.shape[2], dim, name)
    values, factors = keys.operands(*keys.gather(cache, slots))
    return (values * factors[:, None]).astype(np.float32)
