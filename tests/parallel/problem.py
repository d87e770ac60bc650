"""One decode or prefill problem, whole and as each rank of a context-parallel group has it. NumPy alone."""

from dataclasses import dataclass

import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32
from xmla.core.ops.cases import block_tables, indexer_pool, mla_pool, normal, row_lengths, slots_of
from xmla.core.parallel import Ownership

F32 = np.dtype(np.float32)
K, SCALE, PAGE = 48, 0.1352, 16


@dataclass(frozen=True)
class Problem:
    """Arguments of `dsa_attention` by name; `ranks` has, for each rank, its caches and block table."""

    whole: dict[str, np.ndarray]
    ranks: list[dict[str, np.ndarray]]
    ownership: Ownership


def make(
    ownership: Ownership, contexts: tuple[int, ...], next_n: int, heads: int = 8, ids: bool = False, ties: bool = False,
    seed: int = 0, index_format: str = "fp8",
) -> Problem:  # fmt: skip
    layout = IndexerLayout(128, index_format)
    rng = np.random.default_rng(seed)
    size = ownership.page_size
    lengths = np.array(contexts)
    width = -(-max(contexts) // size) + 1
    pages = int(sum(-(-lengths // size))) + 2
    table = block_tables(rng, lengths, size, pages, width)
    used = slots_of(table, lengths, size)
    tokens = len(contexts) * next_n
    indexer = indexer_pool(rng, layout, pages, size, used)
    if ties:  # few different keys: the total order decides by position, across ranks
        page, offset = np.divmod(used, size)
        values, scales = layout.gather(indexer, used[:3])
        pick = rng.integers(0, 3, len(used))
        layout.scatter(indexer, page * size + offset, values[pick], scales[pick])
    whole = {
        "q": normal(rng, tokens, heads, 576),
        "index_q": normal(rng, tokens, 4, 128),
        "index_weights": normal(rng, tokens, 4, dtype=F32),
        "mla_cache": mla_pool(rng, V32, pages, size, used),
        "indexer_cache": indexer,
        "block_table": table,
        "lengths": row_lengths(rng, lengths, next_n),
        "sink": normal(rng, heads, dtype=F32),
    }
    if ids:
        order = rng.permutation(tokens)
        whole["request_ids"] = (np.arange(tokens) // next_n)[order].astype(np.int32)
        whole["lengths"] = whole["lengths"][order]
        whole["lengths"][0] = 0  # padding
    return Problem(whole, [share(whole, ownership, rank, lengths) for rank in range(ownership.ranks)], ownership)


def share(whole: dict[str, np.ndarray], own: Ownership, rank: int, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The pages of `rank` in pools of its own, shuffled, beside a page of NaN."""
    table = whole["block_table"]
    mine = np.full_like(table, -1)
    pages = []
    for request, length in enumerate(lengths):
        for page in own.own_pages(-(-int(length) // own.page_size), rank):
            mine[request, page] = len(pages)
            pages.append(table[request, page])
    room = len(whole["mla_cache"]) + 1  # the same on every rank
    order = np.random.default_rng(rank).permutation(room)[: len(pages)]
    mine[mine >= 0] = order[mine[mine >= 0]]
    shared = {"block_table": mine}
    for name in ("mla_cache", "indexer_cache"):
        pool = np.full((room, *whole[name].shape[1:]), 0xFF, np.uint8)
        pool[order] = whole[name][pages]
        shared[name] = pool
    return shared


PROBLEMS = {
    "decode, interleaved": lambda ranks: make(Ownership(ranks, PAGE), (150, 20, 1), 1),
    "two tokens per request, contiguous": lambda ranks: make(Ownership.contiguous(ranks, PAGE, 7), (110, 33), 2),
    "prefill of one request, ties": lambda ranks: make(Ownership(ranks, PAGE, 2), (100,), 6, ties=True),
    "mixed, padding": lambda ranks: make(Ownership(ranks, PAGE), (40, 100), 2, ids=True),
    "MXFP4 keys": lambda ranks: make(Ownership(ranks, PAGE), (150, 90), 1, index_format="mxfp4"),
}
