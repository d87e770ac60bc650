from dataclasses import replace

import ml_dtypes
import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Case
from xmla.core.ops.cases import BF16, indexer_keys, normal

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.dtype(np.float32)


def query(rng: np.random.Generator, tokens: int, heads: int, dim: int, dtype: np.dtype = E4M3) -> dict[str, np.ndarray]:
    q8 = normal(rng, tokens, heads, dim, dtype=F32).astype(dtype)
    return {"q8": q8, "weights": normal(rng, tokens, heads, dtype=F32)}


def make_case(tokens: int, heads: int, keys: int, dim: int = 128, layout: str = "fp8", dtype: np.dtype = E4M3) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        starts = rng.integers(0, keys // 2, tokens).astype(np.int32)
        ends = (starts + rng.integers(0, keys // 2, tokens)).astype(np.int32)
        starts[0], ends[0] = 0, keys  # everything
        starts[-1], ends[-1] = -5, keys + 1000 if tokens > 1 else keys  # clamped
        if tokens > 2:
            starts[1], ends[1] = 7, 7  # empty
        values, scales = indexer_keys(rng, IndexerLayout(dim, layout), keys)
        return {
            **query(rng, tokens, heads, dim, dtype),
            "keys": values,
            "key_scales": scales,
            "starts": starts,
            "ends": ends,
        }

    return Case(f"{layout}-t{tokens}-i{heads}-d{dim}-n{keys}-q {dtype.name}", make)


def in_bfloat16(case: Case) -> Case:
    return replace(case, name=f"{case.name}-bf16 logits", attrs={**case.attrs, "logits_dtype": "bfloat16"})


CASES = (
    make_case(1, 64, 65),
    make_case(19, 32, 300),
    make_case(5, 3, 129, dim=64),
    make_case(4, 128, 31, dim=32),
    make_case(3, 8, 2),
    make_case(3, 64, 133, layout="mxfp4"),
    make_case(5, 32, 129, dim=64, layout="mxfp4", dtype=BF16),
    make_case(4, 3, 31, dim=32, layout="mxfp4"),
    in_bfloat16(make_case(19, 32, 131)),
    in_bfloat16(make_case(3, 64, 67, layout="mxfp4")),
    make_case(5, 32, 131, layout="fp8_ue8m0"),
)
