import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import BF16, empty_pages, normal

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
INVALID = (-(2**31), -123456, -1, 2**31 - 1)


def make_columns(rng: np.random.Generator, tokens: int, count: int, chosen: int | None) -> dict[str, np.ndarray]:
    """Ranges of packed documents, or of a part of the keys, and with `chosen` as many indices a token.

    The last eighth of the keys is nobody's.
    """
    known = max(count - count // 8, 1)
    starts = rng.integers(0, known // 2 + 1, tokens).astype(np.int32)
    ends = np.minimum(starts + rng.integers(1, known // 2 + 2, tokens), known).astype(np.int32)
    starts[0], ends[0] = -5, known
    if tokens > 2:
        starts[1], ends[1] = 7, 7  # empty
        starts[2], ends[2] = 9, -3
    if chosen is None:
        return {"ends": ends, "starts": starts}
    indices = rng.integers(0, known, (tokens, chosen)).astype(np.int32)  # some twice
    bad = rng.random(indices.shape) < 0.1
    indices = np.where(bad, rng.choice([*INVALID, count], indices.shape), indices).astype(np.int32)
    return {"ends": ends, "starts": starts, "indices": indices}


def named(count: int, columns: dict[str, np.ndarray]) -> np.ndarray:
    """The keys that a token may see and, with indices, names."""
    if not columns:
        return np.arange(count)
    seen = np.zeros(count, bool)
    for token in range(len(next(iter(columns.values())))):
        start = max(int(columns["starts"][token]), 0) if "starts" in columns else 0
        end = min(int(columns["ends"][token]), count) if "ends" in columns else count
        key = columns["indices"][token] if "indices" in columns else np.arange(count)
        seen[key[(key >= start) & (key < end)]] = True
    return np.nonzero(seen)[0]


def rows_at(
    rng: np.random.Generator, count: int, dims: int, used: np.ndarray, dtype: np.dtype, padding: int = 0
) -> np.ndarray:
    """Rows [count, dims], NaN but for those `used`, `padding` elements apart."""
    rows = empty_pages(count, 1, dims, dtype, padding)[:, 0]
    rows[used] = normal(rng, len(used), dims, dtype=dtype)
    return rows


def make_case(
    tokens: int, heads: int, count: int, dim: int, chosen: int | None = None, dtype: np.dtype = BF16,
    without: tuple[str, ...] = (), padding: int = 0,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        columns = make_columns(rng, tokens, count, chosen)
        columns = {name: array for name, array in columns.items() if name not in without}
        q = normal(rng, heads, tokens, dim, dtype=dtype).transpose(1, 0, 2)
        used = named(count, columns)
        k = rows_at(rng, count, dim, used, dtype, padding)
        q[0, :, : dim // 2] = 0  # the products of this token with a third of the keys are exactly 0
        k[used[::3], dim // 2 :] = 0
        return {"q": q, "k": k, "weights": normal(rng, tokens, heads, dtype=F32, scale=heads**-0.5), **columns}

    kind = "dense" if chosen is None else f"k{chosen}"
    bounds = "".join(f"-no {name}" for name in without)
    return Case(f"t{tokens}-i{heads}-d{dim}-n{count}-{kind}{'' if dtype == BF16 else '-' + dtype.name}{bounds}", make)


CASES = (
    make_case(1, 64, 130, 128),
    make_case(5, 3, 77, 64, padding=8),
    make_case(67, 32, 290, 64),
    make_case(9, 32, 140, 32, dtype=F16, without=("starts", "ends")),
    make_case(4, 16, 90, 32, chosen=70, padding=16),
    make_case(3, 20, 60, 128, chosen=33, dtype=F16, without=("starts",)),
    make_case(3, 8, 40, 32, chosen=9, without=("starts", "ends")),
)
