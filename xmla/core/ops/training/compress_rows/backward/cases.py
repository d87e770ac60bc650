from dataclasses import replace

import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cache.compress_kv.cases import F32
from xmla.core.ops.cases import normal
from xmla.core.ops.training.compress_rows.cases import CASES as CALLS


def backward_of(case: Case) -> Case:
    """The derivative of a call, of any gradient; NaN where no entry stands, since it is not read there."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        positions, ratio = inputs["positions"], len(inputs["ape"])
        dims = len(inputs["norm_weight"]) if "norm_weight" in inputs else inputs["kv"].shape[1]
        drows = normal(rng, len(positions), dims, dtype=F32)
        drows[(positions < 0) | (positions % ratio != ratio - 1)] = np.nan
        return inputs | {"drows": drows}

    return replace(case, make=make)


CASES = tuple(map(backward_of, CALLS))
