import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32
from xmla.core.op import Case
from xmla.core.ops.cases import block_tables, indexer_pool, mla_pool, naming, normal, row_lengths, slots_of

F32 = np.dtype(np.float32)


def _case(
    contexts: tuple[int, ...], next_n: int, heads: int, k: int, entries: int = 64, index_heads: int = 64,
    shuffled: bool = False, with_sink: bool = False, layout: str = "fp8",
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        lengths = np.array(contexts)
        pages = int(sum(-(-lengths // entries))) + 2
        table = block_tables(rng, lengths, entries, pages, -(-max(contexts) // entries) + 1)
        used = slots_of(table, lengths, entries)
        tokens = len(contexts) * next_n
        inputs = {
            "q": normal(rng, tokens, heads, 576),
            "index_q": normal(rng, tokens, index_heads, 128),
            "index_weights": normal(rng, tokens, index_heads, dtype=F32),
            "mla_cache": mla_pool(rng, V32, pages, entries, used, 656),
            "indexer_cache": indexer_pool(rng, IndexerLayout(128, layout), pages, entries, used, 132),
            "block_table": table,
            "lengths": row_lengths(rng, lengths, next_n),
        }
        if shuffled:
            order = rng.permutation(tokens)
            inputs["lengths"] = inputs["lengths"][order]
            inputs["request_ids"] = (np.arange(tokens) // next_n)[order].astype(np.int32)
            inputs["lengths"][0] = 0  # a padding row
        if with_sink:
            inputs["sink"] = normal(rng, heads, dtype=F32)
        return inputs

    kind = "ids" if shuffled else f"next{next_n}"
    attrs = {"k": k, "softmax_scale": 0.1352, **naming(IndexerLayout(128, layout), "indexer_cache_format")}
    return Case(f"{layout}-b{len(contexts)}-{kind}-h{heads}-k{k}-page{entries}", make, attrs)


CASES = (
    _case((150, 20), 1, 16, 64),
    _case((70, 3), 2, 8, 32, entries=53, with_sink=True),
    _case((40, 133), 2, 24, 48, shuffled=True),
    _case((90, 11), 2, 16, 40, layout="mxfp4"),
    _case((40, 9), 2, 16, 128),  # no request can have more keys than are selected
    _case((30, 41), 2, 24, 130, shuffled=True),
    _case((50, 70), 1, 8, 40, layout="fp8_ue8m0"),
)
