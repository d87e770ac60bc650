import numpy as np

from xmla.core.layout import V32


def reference(latent: np.ndarray, rope: np.ndarray, slots: np.ndarray, cache: np.ndarray) -> None:
    """Definition of `write_mla_cache`; updates `cache` in place."""
    pages, entries, _ = cache.shape
    valid = (slots >= 0) & (slots < pages * entries)
    page, offset = np.divmod(slots[valid], entries)
    cache.view(np.uint8)[page, offset] = V32.write(latent[valid], rope[valid])
