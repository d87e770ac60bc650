import numpy as np

from xmla.core.cases import BF16, empty_pages
from xmla.core.layout import IndexerLayout
from xmla.core.op import Case


def _case(tokens: int, entries: int, dim: int = 128, dtype: np.dtype = BF16, padding: int = 0) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        pages = -(-tokens // entries) + 2
        keys = rng.standard_normal((tokens, dim), np.float32) * np.exp2(rng.uniform(-24, 12, (tokens, 1)))
        keys[0] = 0.0
        keys[-1, 3] = np.nan
        slots = rng.permutation(pages * entries)[:tokens].astype(np.int32)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * entries, 2**31 - 1])
        cache = empty_pages(pages, entries, IndexerLayout(dim).row, np.dtype(np.uint8), padding)
        return {"keys": keys.astype(dtype), "slots": slots, "cache": cache}

    return Case(f"t{tokens}-page{entries}-d{dim}-{np.dtype(dtype).name}-pad{padding}", make)


CASES = (
    _case(1, 64),
    _case(19, 2, padding=132),
    _case(37, 61, dim=64, dtype=np.dtype(np.float32), padding=4),
    _case(21, 53, dim=32, dtype=np.dtype(np.float16)),
)
