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
from xmla.core.ops.cases import mla_pool


def _case(
    tokens: int, entries: int, dtype: str, layout: MlaLayout = V32, padding: int = 0, arbitrary_scales: bool = False,
    **attrs: object,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        pages = -(-tokens // entries) + 2
        slots = rng.permutation(pages * entries)[:tokens].astype(np.int32)
        cache = mla_pool(rng, layout, pages, entries, slots, padding)
        if arbitrary_scales:  # what vLLM's writer stores
            page, offset = np.divmod(slots, entries)
            scales = rng.uniform(1e-3, 0.1, (tokens, 4)).astype(np.float32)
            cache[page, offset, layout.scale_offset : layout.scale_offset + 16] = scales.view(np.uint8)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * entries, 2**31 - 1])
        return {"cache": cache, "slots": slots}

    name = f"{layout.name}-t{tokens}-page{entries}-{dtype}-pad{padding}"
    return Case(name, make, {"dtype": dtype, **attrs})


CASES = (
    _case(1, 64, "bfloat16"),
    _case(7, 2, "float32", padding=656),
    _case(13, 61, "bfloat16", padding=16, arbitrary_scales=True),
    _case(9, 576, "float32", arbitrary_scales=True),
    _case(9, 2, "bfloat16", V4, padding=560),
    _case(9, 53, "float32", V41, padding=3, cache_format="v41"),
    _case(9, 61, "float32", V41_FP4, cache_format="v41_fp4"),
    _case(9, 2, "bfloat16", V41_FOOTER, padding=5, cache_format="v41_footer"),
    _case(6, 53, "float32", V41_FP4_FOOTER, cache_format="v41_fp4_footer"),
    _case(9, 64, "float32", NOPE, arbitrary_scales=True, cache_format="nope"),
    *(_case(6, 69, "float32", layout) for layout in (NVFP4, NVFP4_BF16, NVFP4_NOPE, V4_NVFP4, PLAIN, PLAIN_V4)),
    *(
        _case(6, 69, "float32", layout, padding=4, cache_format=layout.name)
        for layout in (NVFP4_FP8, NVFP4_SCALED, V4_MXFP4)
    ),
)
