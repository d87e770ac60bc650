import numpy as np

from xmla.core.formats.mla import mla_layouts
from xmla.core.values import Spec


def reference(
    source: np.ndarray,
    source_slots: np.ndarray,
    slots: np.ndarray,
    cache: np.ndarray,
    *,
    source_format: str | None = None,
    cache_format: str | None = None,
    scale_floor: str = "scale",
) -> tuple[()]:
    """Reference of `convert_mla_cache`; updates `cache` in place."""
    (origin,) = mla_layouts(Spec.of_numpy(source), source_format)
    (layout,) = mla_layouts(Spec.of_numpy(cache), cache_format)
    valid = (source_slots >= 0) & (source_slots < source.shape[0] * source.shape[1])
    valid &= (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    if origin == layout and (layout.packed or source.dtype == cache.dtype):
        layout.copy(source, source_slots[valid], cache, slots[valid])
        return ()
    rows = origin.gather(source, source_slots[valid])
    layout.scatter(cache, slots[valid], rows[:, : layout.latent], rows[:, layout.latent :], scale_floor)
    return ()
