import ml_dtypes
import numpy as np

from xmla.core.cases import normal
from xmla.core.op import Case

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.dtype(np.float32)


def query(rng: np.random.Generator, tokens: int, heads: int, dim: int) -> dict[str, np.ndarray]:
    q8 = normal(rng, tokens, heads, dim, dtype=F32).astype(E4M3)
    return {"q8": q8, "weights": normal(rng, tokens, heads, dtype=F32)}


def _case(tokens: int, heads: int, keys: int, dim: int = 128) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        starts = rng.integers(0, keys // 2, tokens).astype(np.int32)
        ends = (starts + rng.integers(0, keys // 2, tokens)).astype(np.int32)
        starts[0], ends[0] = 0, keys  # everything
        starts[-1], ends[-1] = -5, keys + 1000 if tokens > 1 else keys  # clamped
        if tokens > 2:
            starts[1], ends[1] = 7, 7  # empty
        values = normal(rng, keys, dim, dtype=F32).astype(E4M3)
        return {
            **query(rng, tokens, heads, dim),
            "keys": values,
            "key_scales": rng.uniform(0.01, 1.0, keys).astype(np.float32),
            "starts": starts,
            "ends": ends,
        }

    return Case(f"t{tokens}-i{heads}-d{dim}-n{keys}", make)


CASES = (_case(1, 64, 65), _case(19, 32, 300), _case(5, 3, 129, dim=64), _case(4, 128, 31, dim=32), _case(3, 8, 2))
