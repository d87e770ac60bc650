from typing import Any

from xmla.core.call import F32, INDEX, Problem, Result, Tensor
from xmla.core.op import Op
from xmla.core.ops.selection.merge_topk.cases import CASES
from xmla.core.ops.selection.merge_topk.plan import plan
from xmla.core.ops.selection.merge_topk.reference import reference
from xmla.core.plan import Implementation


def merge_topk(values, indices, *, k: int) -> Any:
    """The top-k of a row from the candidates of several parts: exact if every part gives its own top-k.

    Selection: the first k in the order of `select_topk`, value descending, then index ascending; −0 equals +0, NaN
    comes after −inf. Order of the result: ascending index.

    Args:
        values: [W, T, N] float32, N candidates from each of W parts.
        indices: [W, T, N] int32, the candidates' indices in the whole row. A negative index is padding wherever it
            stands; its value may be anything. An index that occurs twice is two candidates.
        k: K ≥ 1, any size.

    Returns:
        top_values: [T, K] float32, −inf where there is no index.
        top_indices: [T, K] int32, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1.

    Example:
        >>> values = xp.asarray([[[5.0, 1.0]], [[4.0, 3.0]]])
        >>> indices = xp.asarray([[[10, 2]], [[7, 30]]], dtype=xp.int32)
        >>> top_values, top_indices = ops.merge_topk(values, indices, k=2)
        >>> top_values.tolist(), top_indices.tolist()
        ([[4.0, 5.0]], [[7, 10]])
    """


def check(problem: Problem) -> None:
    problem.require_count("k")


OP = Op(
    prototype=merge_topk,
    tensors={"values": Tensor("W T N", F32), "indices": Tensor("W T N", INDEX)},
    outputs={
        "top_values": Result("T K", "float32", sizes={"K": lambda p: p.attrs.k}),
        "top_indices": Result("T K", "int32", sizes={"K": lambda p: p.attrs.k}),
    },
    check=check,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
