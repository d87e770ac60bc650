import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import BF16, empty_pages, normal
from xmla.core.ops.training.indexer_scores.cases import F16, F32


def _case(tokens: int, heads: int, count: int, dim: int, dtype: np.dtype = BF16, padding: int = 0) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        keys = empty_pages(count, 1, dim, dtype, padding)[:, 0]
        keys[:] = normal(rng, count, dim, dtype=dtype)
        return {
            "forward_dindex_q": normal(rng, heads, tokens, dim, dtype=dtype).transpose(1, 0, 2),
            "forward_dindex_k": keys,
            "forward_dindex_weights": normal(rng, tokens, heads, dtype=F32),
            "dloss": normal(rng, 1, dtype=F32),
        }

    return Case(f"t{tokens}-i{heads}-d{dim}-n{count}{'' if dtype == BF16 else '-' + dtype.name}", make)


CASES = (_case(5, 3, 77, 64, padding=8), _case(3, 20, 60, 128, F16), _case(1, 64, 33, 32))
