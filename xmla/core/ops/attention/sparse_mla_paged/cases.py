import numpy as np

from xmla.core.formats.mla import PLAIN, V32, MlaLayout
from xmla.core.op import Case
from xmla.core.ops.cases import block_tables, mla_pool, normal, row_lengths, slots_of


def _case(
    contexts: tuple[int, ...], next_n: int, heads: int, k: int, layout: MlaLayout, entries: int,
    shuffled: bool = False, with_sink: bool = False,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        known = np.array(contexts)
        pages = int(sum(-(-known // entries))) + 2
        table = block_tables(rng, known, entries, pages, -(-max(contexts) // entries) + 1)
        pool = mla_pool(rng, layout, pages, entries, slots_of(table, known, entries), layout.row)
        tokens, lengths = len(contexts) * next_n, row_lengths(rng, known, next_n)
        indices = rng.integers(0, np.maximum(lengths, 1)[:, None], (tokens, k))
        bad = rng.choice([-1, -(2**31), max(contexts), 2**31 - 1], indices.shape)
        indices = np.where(rng.random(indices.shape) < 0.2, bad, indices).astype(np.int32)
        inputs = {
            "q": normal(rng, tokens, heads, layout.dims),
            "cache": pool,
            "indices": indices,
            "block_table": table,
            "lengths": lengths,
        }
        if shuffled:
            order = rng.permutation(tokens)
            inputs |= {"lengths": lengths[order], "indices": indices[order]}
            inputs["request_ids"] = (np.arange(tokens) // next_n)[order].astype(np.int32)
            inputs["lengths"][0] = 0  # a padding row
        if with_sink:
            inputs["sink"] = normal(rng, heads, dtype=np.dtype(np.float32))
        return inputs

    kind = "ids" if shuffled else f"next{next_n}"
    return Case(f"{layout.name}-b{len(contexts)}-{kind}-h{heads}-k{k}-page{entries}", make, {"softmax_scale": 0.1352})


CASES = (
    _case((150, 20), 1, 24, 48, V32, 64),
    _case((70, 3), 2, 8, 33, PLAIN, 53, shuffled=True, with_sink=True),
)
