from typing import Any

from xmla.core.call import INDEX, Limit, Problem, Result, Tensor
from xmla.core.op import Op
from xmla.core.ops.selection.select_topk.cases import CASES
from xmla.core.ops.selection.select_topk.plan import IMPLEMENTATIONS
from xmla.core.ops.selection.select_topk.reference import reference
from xmla.core.values import Selection


def select_topk(logits, ends, starts=None, *, k: int) -> Any:
    """The k largest logits of each row's range, exactly and deterministically.

    Selection: the first k in the total order value descending, then column ascending; −0 equals +0, NaN comes after
    −inf. Order of the result: ascending column, so a range of at most k columns gives 0, 1, …, then −1.

    Args:
        logits: [T, N] float32 or bfloat16, of which more elements tie. Elements outside a row's range are never read
            and may hold anything.
        ends: [T] int32, the end of each row's range, clamped to [0, N].
        starts: [T] int32, the start of each row's range, clamped to [0, N], default 0; ends ≤ starts is an empty row.
        k: K ≥ 1, any size.

    Returns:
        indices: [T, K] int32, column − start, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1.

    Rows with a range of at most k columns are not read at all, nor is any row if N ≤ k. Indices are relative to the
    start, as in vLLM's top_k_per_row. xmla guarantees the order among the k; its peers leave it open.

    Example:
        >>> logits, ends = xp.asarray([[0.5, 3.0, 1.0, 2.0]]), xp.asarray([4], dtype=xp.int32)
        >>> ops.select_topk(logits, ends, k=2).tolist()
        [[1, 3]]
    """


def check(problem: Problem) -> None:
    problem.require_count("k")


OP = Op(
    prototype=select_topk,
    tensors={
        "logits": Tensor("T N", ("float32", "bfloat16")),
        "ends": Tensor("T", INDEX),
        "starts": Tensor("T", INDEX),
    },
    outputs={"indices": Result("T K", "int32", sizes={"K": lambda p: p.attrs.k}, agreement=Selection())},
    check=check,
    limits=lambda p, arrays: [Limit(name, 0, p["N"]) for name in ("starts", "ends") if p.has(name)],
    implementations=IMPLEMENTATIONS,
    reference=reference,
    cases=CASES,
)
