from typing import Any

from xmla.core.call import F32, FLOATS, INDEX, Problem, Result, Tensor, Work
from xmla.core.op import Op
from xmla.core.ops.training.compress_rows.backward.cases import CASES
from xmla.core.ops.training.compress_rows.backward.plan import plan
from xmla.core.ops.training.compress_rows.backward.reference import reference
from xmla.core.ops.training.compress_rows.check import check_rows, dims_of
from xmla.core.plan import Implementation
from xmla.core.values import GRADIENT


def compress_rows_backward(
    kv, score, ape, positions, drows, norm_weight=None, cos_sin=None, *, eps: float = 1e-6
) -> Any:  # fmt: skip
    """The derivative of `compress_rows`, from its arguments and the gradient of its result.

        dnormed      = drows[n], its last E dims rotated back                      n, w and pooled as in `compress_rows`
        unit         = pooled · s, s = 1 / sqrt(mean(pooled²) + eps)
        dpooled      = s · (dnormed · norm_weight − unit · mean(dnormed · norm_weight · unit)), without it dnormed
        dkv[q]       = w[q] · dpooled                                                in the series of q's in that window
        dscore[q]    = dkv[q] · (kv[q] − pooled)
        dape[a]      = Σ_q dscore[q], q mod r = a
        dnorm_weight = Σ_n dnormed · unit

    Args:
        kv, score, ape, positions, norm_weight, cos_sin, eps: As in `compress_rows`.
        drows: [N, D] float32: the gradient of the rows. Read only of tokens that complete an entry.

    Returns:
        dkv: [N, C·D], dtype of kv; 0 for a series of a token whose entry no token of the call completes.
        dscore: [N, C·D], dtype of score; 0 likewise.
        dape: [r, C·D] float32.
        dnorm_weight: [D], dtype of norm_weight; [0] without it.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    Numerics: float32. The sums of dape and dnorm_weight are over the tokens in order, in blocks of 32, so that the same
    arguments give the same bits.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> kv, score, ape = xp.ones((2, 32)), xp.zeros((2, 32)), xp.zeros((2, 32))
        >>> positions, drows = xp.arange(2, dtype=xp.int32), xp.ones((2, 32))
        >>> dkv, *_ = ops.compress_rows_backward(kv, score, ape, positions, drows)
        >>> dkv[:, 0].tolist()
        [0.5, 0.5]
    """


def check(problem: Problem) -> None:
    check_rows(problem)
    dims = dims_of(problem)
    if problem.specs["drows"].shape[1] != dims:
        problem.refuse("drows", "axis D (axis 1)", problem.specs["drows"].shape[1], dims)


def work(problem: Problem, keys: float | None) -> Work:
    return Work(problem.nbytes)


OP = Op(
    prototype=compress_rows_backward,
    tensors={
        "kv": Tensor("N C·D", FLOATS),
        "score": Tensor("N C·D", FLOATS),
        "ape": Tensor("r C·D", F32),
        "positions": Tensor("N", INDEX),
        "drows": Tensor("N D", F32),
        "norm_weight": Tensor("D", FLOATS),
        "cos_sin": Tensor("S E", FLOATS),
    },
    outputs={
        "dkv": Result("N C·D", lambda p: p.specs["kv"].dtype, agreement=GRADIENT),
        "dscore": Result("N C·D", lambda p: p.specs["score"].dtype, agreement=GRADIENT),
        "dape": Result("r C·D", "float32", agreement=GRADIENT),
        "dnorm_weight": Result(
            "D",
            lambda p: p.specs["norm_weight"].dtype if p.has("norm_weight") else "float32",
            sizes={"D": lambda p: p["D"] if p.has("norm_weight") else 0},
            agreement=GRADIENT,
        ),
    },
    check=check,
    work=work,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
