from dataclasses import replace

import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import normal
from xmla.core.ops.training.indexer_scores.cases import F16, F32, make_case
from xmla.core.ops.training.indexer_scores.reference import reference, valid_columns


def backward_of(case: Case) -> Case:
    """The derivative of a call; gradients of columns that are not valid are NaN."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        (scores,) = reference(**inputs)
        dscores = np.full(scores.shape, np.nan, F32)
        columns = {name: inputs.get(name) for name in ("ends", "starts", "indices")}
        for token, valid, _ in valid_columns(len(inputs["q"]), len(inputs["k"]), **columns):
            dscores[token, valid] = normal(rng, len(valid), dtype=F32, scale=0.25)
        return inputs | {"dscores": dscores}

    return replace(case, make=make)


CASES = (
    backward_of(make_case(1, 64, 70, 128)),
    backward_of(make_case(5, 3, 77, 64, padding=8)),
    backward_of(make_case(4, 16, 90, 32, chosen=70, padding=16)),
    backward_of(make_case(3, 20, 60, 64, chosen=33, dtype=F16, without=("starts",))),
    backward_of(make_case(3, 8, 40, 32, chosen=9, without=("starts", "ends"))),
)
