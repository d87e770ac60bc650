import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Case
from xmla.core.ops.cases import empty_pages, indexer_pool, naming


def _case(
    tokens: int, dim: int, formats: tuple[str, str], entries: int, pages_of: int, dtype: type = np.int32,
    padding: int = 0, **attrs: object,
) -> Case:  # fmt: skip
    origin, layout = (IndexerLayout(dim, form) for form in formats)

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        source_pages, pages = -(-tokens // entries) + 2, -(-tokens // pages_of) + 1
        source_slots = rng.permutation(source_pages * entries)[:tokens].astype(dtype)
        source = indexer_pool(rng, origin, source_pages, entries, source_slots, padding)
        slots = rng.permutation(pages * pages_of)[:tokens].astype(dtype)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * pages_of, 2**31 - 1])
        source_slots[tokens // 3] = rng.choice([-1, -(2**31), source_pages * entries, 2**31 - 1])
        cache = empty_pages(pages, pages_of, layout.row, np.dtype(np.uint8), padding)
        return {"source": source, "source_slots": source_slots, "slots": slots, "cache": cache}

    named = naming(origin, "source_format") | naming(layout)
    return Case(f"d{dim}-{formats[0]}-page{entries}-to-{formats[1]}-page{pages_of}", make, named | attrs)


CASES = (
    _case(19, 128, ("fp8", "mxfp4"), 64, 61),
    _case(17, 128, ("mxfp4", "fp8"), 2, 64, np.int64, padding=4),
    _case(21, 64, ("fp8", "mxfp4"), 53, 3),
    _case(9, 64, ("mxfp4", "fp8"), 64, 64, padding=68),
    _case(18, 32, ("fp8", "mxfp4"), 7, 64),
    _case(5, 32, ("mxfp4", "fp8"), 64, 2),
    _case(6, 128, ("fp8", "fp8"), 64, 2, padding=132),
    _case(7, 64, ("fp8", "fp8"), 3, 64, source_format="fp8"),
    _case(7, 128, ("mxfp4", "mxfp4"), 5, 64, cache_format="mxfp4"),
    _case(11, 128, ("fp8_ue8m0", "fp8"), 3, 64),
    _case(11, 128, ("mxfp4", "fp8_ue8m0"), 64, 3),
)
