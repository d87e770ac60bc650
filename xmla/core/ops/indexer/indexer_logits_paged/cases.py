import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Case
from xmla.core.ops.cases import BF16, block_tables, indexer_pool, naming, row_lengths, slots_of
from xmla.core.ops.indexer.indexer_logits.cases import E4M3, in_bfloat16, query


def interleave(rng: np.random.Generator, inputs: dict[str, np.ndarray], next_n: int) -> None:
    """Shuffle tokens of all requests, and let two be padding: one without a request, one of negative length."""
    order = rng.permutation(len(inputs["lengths"]))
    inputs["lengths"] = inputs["lengths"][order]
    inputs["request_ids"] = (np.arange(len(order)) // next_n)[order].astype(np.int32)
    inputs["request_ids"][0] = -1
    inputs["lengths"][-1] = -7


def make_case(
    contexts: tuple[int, ...], entries: int, next_n: int = 1, heads: int = 64, dim: int = 128, padding: int = 0,
    shuffled: bool = False, max_len: int | None = None, layout: str = "fp8", dtype: np.dtype = E4M3,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        lengths = np.array(contexts)
        width = -(-max(contexts) // entries) + 1
        pages = int(sum(-(-lengths // entries))) + 1
        table = block_tables(rng, lengths, entries, pages, width)
        used = slots_of(table, lengths, entries)
        inputs = {
            **query(rng, len(contexts) * next_n, heads, dim, dtype),
            "cache": indexer_pool(rng, IndexerLayout(dim, layout), pages, entries, used, padding),
            "block_table": table,
            "lengths": row_lengths(rng, lengths, next_n),
        }
        inputs["lengths"][0] = min(inputs["lengths"][0], 1)
        if shuffled:
            interleave(rng, inputs, next_n)
        return inputs

    kind = "ids" if shuffled else f"next{next_n}"
    name = f"{layout}-b{len(contexts)}-{kind}-page{entries}-i{heads}-d{dim}-max{max(contexts)}-q {dtype.name}"
    return Case(name, make, {"max_len": max_len, **naming(IndexerLayout(dim, layout))})


CASES = (
    make_case((150,), 64),
    make_case((5, 0, 131), 2, next_n=3, heads=32, padding=132),
    make_case((70, 300), 61, heads=7, dim=64, padding=4, max_len=320),
    make_case((66, 9), 53, next_n=11, heads=16),
    make_case((129, 1, 33), 64, next_n=2, heads=8, dim=32, shuffled=True, max_len=130),
    make_case((200, 70), 64, next_n=5),
    make_case((150, 3), 64, layout="mxfp4", padding=68),
    make_case((5, 0, 131), 61, next_n=3, heads=32, dim=64, layout="mxfp4", dtype=BF16, padding=4),
    make_case((66, 9), 2, next_n=2, heads=7, dim=32, shuffled=True, layout="mxfp4"),
    in_bfloat16(make_case((150, 5), 64, next_n=2, heads=32)),
    in_bfloat16(make_case((66, 9), 61, heads=7, dim=32, layout="mxfp4", max_len=71)),
    make_case((70, 131), 61, next_n=2, heads=32, padding=4, layout="fp8_ue8m0"),
)
