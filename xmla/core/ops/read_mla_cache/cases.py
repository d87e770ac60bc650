import numpy as np

from xmla.core.cases import mla_pool
from xmla.core.layout import V32
from xmla.core.op import Case


def _case(tokens: int, entries: int, dtype: str, padding: int = 0, arbitrary_scales: bool = False) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        pages = -(-tokens // entries) + 2
        slots = rng.permutation(pages * entries)[:tokens].astype(np.int32)
        cache = mla_pool(rng, V32, pages, entries, slots, padding)
        if arbitrary_scales:  # what vLLM's writer stores
            page, offset = np.divmod(slots, entries)
            scales = rng.uniform(1e-3, 0.1, (tokens, 4)).astype(np.float32)
            cache[page, offset, V32.scale_offset : V32.rope_offset] = scales.view(np.uint8)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * entries, 2**31 - 1])
        return {"cache": cache, "slots": slots}

    return Case(f"t{tokens}-page{entries}-{dtype}-pad{padding}", make, {"dtype": dtype})


CASES = (
    _case(1, 64, "bfloat16"),
    _case(7, 2, "float32", padding=656),
    _case(13, 61, "bfloat16", padding=16, arbitrary_scales=True),
    _case(9, 576, "float32", arbitrary_scales=True),
)
