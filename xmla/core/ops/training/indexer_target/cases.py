import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import BF16, normal
from xmla.core.ops.training.indexer_scores.cases import F16, F32, make_columns, named, rows_at
from xmla.core.ops.training.indexer_scores.reference import valid_columns

SCALE = 0.0721688


def attention(
    rng: np.random.Generator, heads: int, count: int, dims: int, columns: dict[str, np.ndarray], dtype: np.dtype,
    padding: int = 0,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Queries, rows and the lse of attention over a token's valid columns."""
    tokens = len(next(iter(columns.values())))
    q = normal(rng, heads, tokens, dims, dtype=dtype).transpose(1, 0, 2)
    rows = rows_at(rng, count, dims, named(count, columns), dtype, padding)
    lse = np.full((tokens, heads), -np.inf, F32)
    bounds = {name: columns.get(name) for name in ("ends", "starts", "indices")}
    for token, _, keys in valid_columns(tokens, count, **bounds):
        scores = SCALE * (q[token].astype(np.float64) @ rows[keys].astype(np.float64).T)
        lse[token] = np.logaddexp.reduce(scores, axis=1, initial=-np.inf)
    return {"q": q, "rows": rows, "lse": lse}


def _case(
    tokens: int, heads: int, count: int, dims: int, chosen: int, dtype: np.dtype = BF16, padding: int = 0,
    without: tuple[str, ...] = (),
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        columns = make_columns(rng, tokens, count, chosen)
        columns = {name: array for name, array in columns.items() if name not in without}
        return attention(rng, heads, count, dims, columns, dtype, padding) | columns

    kind = "" if dtype == BF16 else f"-{dtype.name}"
    bounds = "".join(f"-no {name}" for name in without)
    return Case(f"t{tokens}-h{heads}-d{dims}-n{count}-k{chosen}{kind}{bounds}", make, {"softmax_scale": SCALE})


CASES = (
    _case(1, 128, 40, 576, 33),
    _case(5, 5, 90, 512, 70, padding=8),
    _case(3, 20, 60, 576, 9, F16, without=("starts",)),
    _case(3, 3, 30, 64, 65, padding=16, without=("starts", "ends")),
)
