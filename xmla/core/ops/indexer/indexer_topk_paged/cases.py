import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Case
from xmla.core.ops.cases import block_tables, empty_pages, naming, row_lengths, slots_of
from xmla.core.ops.indexer.indexer_logits_paged.cases import interleave
from xmla.core.ops.indexer.indexer_topk.cases import exact_keys, exact_query


def make_case(
    name: str, contexts: tuple[int, ...], entries: int, k: int, next_n: int = 1, heads: int = 8, dim: int = 32,
    shuffled: bool = False, layout: str = "fp8", **attrs: int,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        lengths = np.array(contexts)
        pages = int(sum(-(-lengths // entries))) + 1
        table = block_tables(rng, lengths, entries, pages, -(-max(contexts) // entries) + 1)
        used = slots_of(table, lengths, entries)
        form = IndexerLayout(dim, layout)
        cache = empty_pages(pages, entries, form.row, np.dtype(np.uint8))
        form.scatter(cache, used, *exact_keys(rng, form, len(used)))
        inputs = {
            **exact_query(rng, len(contexts) * next_n, heads, dim),
            "cache": cache,
            "block_table": table,
            "lengths": row_lengths(rng, lengths, next_n),
        }
        if shuffled:
            interleave(rng, inputs, next_n)
        return inputs

    return Case(name, make, {"k": k, **naming(IndexerLayout(dim, layout)), **attrs})


CASES = (
    make_case("fits", (150, 9), 64, 20),
    make_case(
        "bounded-ids", (2700, 70), 2, 25, next_n=2, shuffled=True, workspace_bytes=74_500
    ),  # second, which several tests take
    make_case("bounded-segments", (9000, 40), 61, 30, workspace_bytes=80_000),
    make_case("bounded-next3", (2900, 0, 131), 64, 50, next_n=3, heads=64, dim=128, workspace_bytes=175_000),
    make_case("bounded-mxfp4", (3500, 40), 61, 30, dim=64, layout="mxfp4", workspace_bytes=38_000),
    make_case("all-selected-ids", (40, 9), 16, 64, next_n=2, shuffled=True, workspace_bytes=0),
    make_case("ue8m0", (150, 9), 64, 20, dim=128, layout="fp8_ue8m0"),
    make_case("bounded-ue8m0", (3500, 40), 61, 30, dim=128, layout="fp8_ue8m0", workspace_bytes=38_000),
)
