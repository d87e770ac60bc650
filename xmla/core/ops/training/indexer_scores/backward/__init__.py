from typing import Any

from xmla.core.call import F32, HALVES, INDEX, Problem, Result, Tensor, Work
from xmla.core.op import Op
from xmla.core.ops.training.indexer_scores.backward.cases import CASES
from xmla.core.ops.training.indexer_scores.backward.plan import plan
from xmla.core.ops.training.indexer_scores.backward.reference import reference
from xmla.core.ops.training.indexer_scores.check import check_scores
from xmla.core.ops.training.indexer_scores.plan import num_columns
from xmla.core.plan import Implementation
from xmla.core.values import GRADIENT


def indexer_scores_backward(q, k, weights, dscores, ends=None, starts=None, indices=None) -> Any:
    """The derivative of `indexer_scores`, from its arguments and the gradient of its result.

        s[t,i,c]      = q[t,i] · k[n(t,c)]                                           c over S[t], as in `indexer_scores`
        ds[t,i,c]     = dscores[t,c] · weights[t,i] · [s[t,i,c] > 0]
        dq[t,i]       = Σ_c ds[t,i,c] · k[n(t,c)]
        dk[n]         = Σ_t Σ_i Σ_c ds[t,i,c] · q[t,i]                               over the columns with n(t,c) = n
        dweights[t,i] = Σ_c dscores[t,c] · relu(s[t,i,c])

    An index that stands twice counts twice.

    Args:
        q, k, weights, ends, starts, indices: As in `indexer_scores`.
        dscores: [T, COLUMNS] float32, COLUMNS = K with indices, else N: the gradient of the scores. Read only in valid
            columns.

    Returns:
        dq: [T, I, D], dtype of q; 0 for a row without valid columns.
        dk: [N, D], dtype of k; 0 for a key of no valid column.
        dweights: [T, I] float32.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
        UnsupportedError: I > 64.

    Numerics: as `indexer_scores` says of its gradients.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, k = xp.ones((1, 2, 32), dtype=xp.bfloat16), xp.ones((3, 32), dtype=xp.bfloat16)
        >>> weights, dscores, ends = xp.ones((1, 2)), xp.ones((1, 3)), xp.asarray([2], dtype=xp.int32)
        >>> dq, dk, dweights = ops.indexer_scores_backward(q, k, weights, dscores, ends)
        >>> dk[:, 0].tolist()
        [2.0, 2.0, 0.0]
    """


def check(problem: Problem) -> None:
    check_scores(problem)
    if problem["COLUMNS"] != num_columns(problem):
        expected = f"{num_columns(problem)}, as {'indices' if problem.has('indices') else 'k'}"
        problem.refuse("dscores", "axis COLUMNS (axis 1)", problem["COLUMNS"], expected)


def work(problem: Problem, keys: float | None) -> Work:
    """Three products: scores again, and those of dq and dk."""
    flops = 6.0 * problem["T"] * problem["COLUMNS"] * problem["I"] * problem["D"]
    return Work(problem.nbytes, bf16_flops=flops)


OP = Op(
    prototype=indexer_scores_backward,
    tensors={
        "q": Tensor("T I D", HALVES),
        "k": Tensor("N D", HALVES),
        "weights": Tensor("T I", F32),
        "dscores": Tensor("T COLUMNS", F32),
        "ends": Tensor("T", INDEX, bound_of="N"),
        "starts": Tensor("T", INDEX, bound_of="N"),
        "indices": Tensor("T K", INDEX, index_of="N"),
    },
    outputs={
        "dq": Result("T I D", lambda p: p.specs["q"].dtype, agreement=GRADIENT),
        "dk": Result("N D", lambda p: p.specs["k"].dtype, agreement=GRADIENT, sum_over="T"),
        "dweights": Result("T I", "float32", agreement=GRADIENT),
    },
    check=check,
    work=work,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
