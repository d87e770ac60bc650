import numpy as np

from xmla.core.formats.mla import mla_layouts
from xmla.core.values import Spec


def reference(
    latent: np.ndarray,
    rope: np.ndarray,
    slots: np.ndarray,
    cache: np.ndarray,
    *,
    cache_format: str | None = None,
    scale_floor: str = "scale",
) -> tuple[()]:
    """Reference of `write_mla_cache`; updates `cache` in place."""
    (layout,) = mla_layouts(Spec.of_numpy(cache), cache_format)
    valid = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    layout.scatter(cache, slots[valid], latent[valid], rope[valid], scale_floor)
    return ()
