import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Case
from xmla.core.ops.cases import indexer_pool


def _case(tokens: int, entries: int, dim: int = 128, padding: int = 0, layout: str | None = None) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        pages = -(-tokens // entries) + 2
        slots = rng.permutation(pages * entries)[:tokens].astype(np.int32)
        cache = indexer_pool(rng, IndexerLayout(dim, layout or "fp8"), pages, entries, slots, padding)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * entries, 2**31 - 1])
        return {"cache": cache, "slots": slots}

    name = f"{layout or 'by row'}-t{tokens}-page{entries}-d{dim}-pad{padding}"
    return Case(name, make, {"cache_format": layout})


CASES = (
    _case(1, 64),
    _case(19, 2, padding=132),
    _case(37, 61, dim=64, padding=4, layout="fp8"),
    _case(21, 576, dim=32, layout="fp8"),
    _case(19, 64, padding=68, layout="mxfp4"),
    _case(37, 61, dim=64, padding=4, layout="mxfp4"),
    _case(21, 2, dim=32, layout="mxfp4"),
    _case(17, 3, layout="fp8_ue8m0"),
)
