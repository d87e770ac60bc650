import numpy as np

from xmla.core.formats.mla import (
    NOPE,
    NVFP4,
    NVFP4_BF16,
    NVFP4_FP8,
    NVFP4_NOPE,
    NVFP4_SCALED,
    PLAIN,
    PLAIN_V4,
    V4,
    V4_MXFP4,
    V4_NVFP4,
    V32,
    V41,
    V41_FOOTER,
    V41_FP4,
    V41_FP4_FOOTER,
    MlaLayout,
)
from xmla.core.op import Case
from xmla.core.ops.cases import BF16, empty_pages, mla_pool


def _case(
    tokens: int, source: MlaLayout, entries: int, layout: MlaLayout, pages_of: int, dtype: type = np.int32,
    padding: int = 0, **attrs: object,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        source_pages, pages = -(-tokens // entries) + 2, -(-tokens // pages_of) + 1
        source_slots = rng.permutation(source_pages * entries)[:tokens].astype(dtype)
        pool = mla_pool(rng, source, source_pages, entries, source_slots, padding)
        slots = rng.permutation(pages * pages_of)[:tokens].astype(dtype)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * pages_of, 2**31 - 1])
        source_slots[tokens // 3] = rng.choice([-1, -(2**31), source_pages * entries, 2**31 - 1])
        kind = np.dtype(np.uint8) if layout.packed else BF16
        cache = empty_pages(pages, pages_of, layout.row, kind, padding)
        return {"source": pool, "source_slots": source_slots, "slots": slots, "cache": cache}

    return Case(f"{source.name}-page{entries}-to-{layout.name}-page{pages_of}", make, attrs)


CASES = (
    _case(9, V32, 64, PLAIN, 61),
    _case(7, PLAIN, 2, V32, 64, padding=8),
    _case(8, V32, 53, NVFP4, 3, np.int64, padding=4),
    _case(6, NVFP4, 5, NVFP4_BF16, 64, padding=2),
    _case(6, NVFP4, 5, NVFP4_SCALED, 64, padding=4, cache_format="nvfp4_scaled"),
    _case(6, NVFP4_FP8, 64, V32, 3, source_format="nvfp4_fp8"),
    _case(6, NVFP4_NOPE, 5, NOPE, 64, cache_format="nope"),
    _case(6, V4, 64, V4_NVFP4, 5, padding=64),
    _case(6, V4_MXFP4, 64, V4, 5, source_format="v4_mxfp4"),
    _case(9, V4, 64, V41_FP4, 64, padding=64, cache_format="v41_fp4"),
    _case(6, V4, 2, V41, 53, cache_format="v41", scale_floor="amax"),
    _case(9, V41, 61, V4, 256, padding=2, source_format="v41"),
    _case(6, V41_FOOTER, 5, V41, 61, padding=3, source_format="v41_footer", cache_format="v41"),
    _case(6, V41_FP4, 3, V41_FP4_FOOTER, 64, source_format="v41_fp4", cache_format="v41_fp4_footer"),
    _case(5, NOPE, 64, V4, 64, padding=4, source_format="nope"),
    _case(5, PLAIN_V4, 7, NOPE, 64, padding=4, cache_format="nope"),
    _case(9, V32, 64, V32, 61),
    _case(7, V4, 2, V4, 53, np.int64, padding=64),
    _case(6, PLAIN, 3, PLAIN, 5, padding=8),
)
