import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Case
from xmla.core.ops.cases import BF16, empty_pages, naming

F32 = np.dtype(np.float32)


def _case(
    tokens: int, entries: int, dim: int = 128, dtype: np.dtype = BF16, padding: int = 0, layout: str = "fp8"
) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        pages = -(-tokens // entries) + 2
        keys = rng.standard_normal((tokens, dim), np.float32) * np.exp2(rng.uniform(-24, 12, (tokens, 1)))
        if layout == "mxfp4":  # blocks far apart, and every tie of e2m1
            keys = keys.astype(np.float32) * np.exp2(rng.integers(-40, 40, (tokens, dim // 32))).repeat(32, axis=1)
            steps = np.arange(-24, 25, dtype=np.float32) / 4
            keys[1::3] = rng.choice(np.append(steps, np.float32(-0.0)), keys[1::3].shape)
        keys[0] = 0.0
        keys[-1, 3] = np.nan
        slots = rng.permutation(pages * entries)[:tokens].astype(np.int32)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * entries, 2**31 - 1])
        cache = empty_pages(pages, entries, IndexerLayout(dim, layout).row, np.dtype(np.uint8), padding)
        return {"keys": keys.astype(dtype), "slots": slots, "cache": cache}

    name = f"{layout}-t{tokens}-page{entries}-d{dim}-{np.dtype(dtype).name}-pad{padding}"
    return Case(name, make, naming(IndexerLayout(dim, layout)))


CASES = (
    _case(1, 64),
    _case(19, 2, padding=132),
    _case(37, 61, dim=64, dtype=F32, padding=4),
    _case(21, 53, dim=32, dtype=np.dtype(np.float16)),
    _case(33, 64, layout="mxfp4", padding=68),
    _case(37, 61, dim=64, dtype=F32, padding=4, layout="mxfp4"),
    _case(21, 2, dim=32, layout="mxfp4"),
    _case(19, 3, layout="fp8_ue8m0", padding=4),
)
