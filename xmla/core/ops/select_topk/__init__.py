from typing import Any

from xmla.core.checks import Limit
from xmla.core.op import F32, INDEX, Op, Problem, Tensor
from xmla.core.ops.select_topk.cases import CASES
from xmla.core.ops.select_topk.plan import plan
from xmla.core.ops.select_topk.reference import reference
from xmla.core.spec import Spec


def select_topk(logits, ends, starts=None, *, k: int) -> Any:
    """The k largest logits of each row's range, exactly and deterministically.

    Which: the first k in the total order value descending, then column ascending; −0 equals +0, NaN comes after −inf.
    Where: listed by ascending column, so that a row with at most k columns gives 0, 1, …, then −1.

    Args:
        logits: [T, N] float32. Elements outside a row's range are never read and may hold anything.
        ends: [T] int32, the end of each row's range, clamped to [0, N].
        starts: [T] int32, its start, clamped to [0, N], default 0; ends ≤ starts is an empty row.
        k: K ≥ 1, any size.

    Returns:
        indices: [T, K] int32, column − start, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1.

    Rows with at most k columns are not read at all. Indices relative to the start are what vLLM's top_k_per_row gives;
    the order among the k is xmla's own promise, where the peers leave it open.
    """


def check(problem: Problem) -> None:
    if problem.attrs["k"] < 1:
        problem.refuse("k", "value", problem.attrs["k"], "at least 1")


OP = Op(
    prototype=select_topk,
    tensors={"logits": Tensor("T N", F32), "ends": Tensor("T", INDEX), "starts": Tensor("T", INDEX)},
    outputs={"indices": lambda p: Spec((p["T"], p.attrs["k"]), "int32")},
    check=check,
    limits=lambda p, arrays: [Limit(name, 0, p["N"]) for name in ("starts", "ends") if p.has(name)],
    plan=plan,
    reference=reference,
    cases=CASES,
)
