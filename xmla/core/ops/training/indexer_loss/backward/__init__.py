from typing import Any

from xmla.core.call import F32, HALVES, Problem, Result, Tensor, check_indexer_dim
from xmla.core.op import Op
from xmla.core.ops.training.indexer_loss.backward.cases import CASES
from xmla.core.ops.training.indexer_loss.backward.plan import plan
from xmla.core.ops.training.indexer_loss.backward.reference import reference
from xmla.core.plan import Implementation
from xmla.core.values import FLOAT32, GRADIENT


def indexer_loss_backward(forward_dindex_q, forward_dindex_k, forward_dindex_weights, dloss) -> Any:
    """The derivative of `indexer_loss`: the gradients that it computed, times the gradient of the loss.

        dindex_q = dloss · forward_dindex_q,  and so dindex_k and dindex_weights

    Args:
        forward_dindex_q: [T, I, D] bfloat16 or float16, D = 32, 64 or 128.
        forward_dindex_k: [N, D], dtype of forward_dindex_q.
        forward_dindex_weights: [T, I] float32.
        dloss: [1] float32.

    Returns:
        dindex_q: [T, I, D], dtype of forward_dindex_q.
        dindex_k: [N, D], dtype of forward_dindex_k.
        dindex_weights: [T, I] float32.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    Numerics: products in float32, rounded once.

    Example:
        >>> dq, dk = xp.ones((1, 2, 32), dtype=xp.bfloat16), xp.ones((3, 32), dtype=xp.bfloat16)
        >>> scaled = ops.indexer_loss_backward(dq, dk, xp.ones((1, 2)), xp.asarray([2.0]))
        >>> scaled[2].tolist()
        [[2.0, 2.0]]
    """


def check(problem: Problem) -> None:
    check_indexer_dim(problem)
    expected = problem.specs["forward_dindex_q"].dtype
    if problem.specs["forward_dindex_k"].dtype != expected:
        got = problem.specs["forward_dindex_k"].dtype
        problem.refuse("forward_dindex_k", "dtype", got, f"{expected}, as forward_dindex_q")
    if problem["LOSS"] != 1:
        problem.refuse("dloss", "axis LOSS (axis 0)", problem["LOSS"], 1)


OP = Op(
    prototype=indexer_loss_backward,
    tensors={
        "forward_dindex_q": Tensor("T I D", HALVES),
        "forward_dindex_k": Tensor("N D", HALVES),
        "forward_dindex_weights": Tensor("T I", F32),
        "dloss": Tensor("LOSS", F32),
    },
    outputs={
        "dindex_q": Result("T I D", lambda p: p.specs["forward_dindex_q"].dtype, agreement=GRADIENT),
        "dindex_k": Result("N D", lambda p: p.specs["forward_dindex_k"].dtype, agreement=GRADIENT),
        "dindex_weights": Result("T I", "float32", agreement=FLOAT32),
    },
    check=check,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
