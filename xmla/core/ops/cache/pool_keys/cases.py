from typing import Any

import numpy as np

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.op import Case
from xmla.core.ops.cache.compress_kv.cases import F16, F32, make_case

NAMES = {"kv": "keys", "score": "gates"}


def _case(*args: Any, **attrs: Any) -> Case:
    """A case of `compress_kv` with one series of dims, without norm and rotation."""
    case = make_case(*args, series=1, **attrs)

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        return {NAMES.get(n, n): array for n, array in inputs.items() if n not in ("norm_weight", "cos_sin")}

    return Case(case.name, make, {name: value for name, value in case.attrs.items() if name == "cache_format"})


CASES = (
    _case((0,), 9, 4, IndexerLayout(128), 64, 4),
    _case((11, 6, 0), 5, 16, IndexerLayout(128), 3, 8, padding=4, with_ids=True),
    _case((30, 17), 7, 4, IndexerLayout(64), 5, 4, dtype=F16, ring=True),
    _case((5, 2), 7, 3, IndexerLayout(32, "mxfp4"), 3, 4, dtype=F32, padding=8),
    _case((3,), 2, 1, IndexerLayout(128, "mxfp4"), 64, 1),
    _case((6, 1), 3, 2, IndexerLayout(128, "fp8_ue8m0"), 2, 3),
)
