from typing import Any

from xmla.core.call import F32, INDEX, Limit, Problem, Result, Tensor
from xmla.core.op import Op
from xmla.core.ops.blocks.select_blocks.cases import CASES
from xmla.core.ops.blocks.select_blocks.plan import plan
from xmla.core.ops.blocks.select_blocks.reference import reference
from xmla.core.ops.blocks.shared import check_newest
from xmla.core.plan import Implementation
from xmla.core.values import Selection


def select_blocks(logits, ends, starts=None, *, k: int, granularity: int, newest: int = 1) -> Any:
    """The k blocks of each row's range with the largest logits, the newest blocks always among them.

        block b  = columns start + b · granularity … start + (b+1) · granularity − 1, as far as they are in the range
        value[b] = its largest logit; of the last `newest` blocks of the range: above all others

    Selection and order of the result as in `select_topk`, over values: exactly and deterministically the first k in the
    order value descending, then block ascending; blocks in ascending order.

    Args:
        logits: [T, N] float32. Elements outside a row's range are never read and may hold anything.
        ends: [T] int32, the end of each row's range, clamped to [0, N].
        starts: [T] int32, the start of each row's range, clamped to [0, N], default 0; ends ≤ starts is an empty row.
        k, granularity, newest: As in `indexer_blocks_paged`.

    Returns:
        indices: [T, K] int32, blocks, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1; granularity or newest is out of range.

    NaN and infinite logits are as in `indexer_blocks_paged`. Rows of at most k blocks are not read at all.

    Example:
        >>> logits, ends = xp.asarray([[0.5, 3.0, 1.0, 2.0, 0.0]]), xp.asarray([5], dtype=xp.int32)
        >>> ops.select_blocks(logits, ends, k=2, granularity=2).tolist()
        [[0, 2]]
    """


def limits(problem: Problem, arrays: object) -> list[Limit]:
    return [Limit(name, 0, problem["N"]) for name in ("starts", "ends") if problem.has(name)]


OP = Op(
    prototype=select_blocks,
    tensors={"logits": Tensor("T N", F32), "ends": Tensor("T", INDEX), "starts": Tensor("T", INDEX)},
    outputs={"indices": Result("T K", "int32", sizes={"K": lambda p: p.attrs.k}, agreement=Selection())},
    check=check_newest,
    limits=limits,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
    instead="indexer_blocks or indexer_blocks_paged",
)
