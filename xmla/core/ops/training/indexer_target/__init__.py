from typing import Any

from xmla.core.call import F32, HALVES, INDEX, Problem, Result, Tensor, Work
from xmla.core.op import Op
from xmla.core.ops.training.indexer_target.cases import CASES
from xmla.core.ops.training.indexer_target.check import check_attention
from xmla.core.ops.training.indexer_target.plan import plan
from xmla.core.ops.training.indexer_target.reference import reference
from xmla.core.plan import Implementation
from xmla.core.values import PROBABILITIES


def indexer_target(q, rows, lse, indices, ends=None, starts=None, *, softmax_scale: float) -> Any:
    """Attention's probabilities at selected keys, summed over heads: what an indexer learns, not yet normalised.

        S[t]        = { c : starts[t] ≤ indices[t,c] < ends[t] }                     the valid columns
        target[t,c] = Σ_h exp(softmax_scale · q[t,h] · rows[indices[t,c]] − lse[t,h])              for c in S[t], else 0

    Ranks that share the heads add their targets up and give the sum to `indexer_loss`, which normalises it.

    Args:
        q: [T, H, L+E] bfloat16 or float16, H ≤ 128, L+E a multiple of 64, such as 576 or 512: attention's queries.
        rows: [N, L+E], dtype of q: attention's plain rows, flat. Rows of no valid column are never read.
        lse: [T, H] float32: attention's own, over the same keys, natural, without a sink. A head whose lse is infinite
            has no keys and adds 0.
        indices: [T, K] int32. A column whose index is outside its token's range is not valid; −1 may stand anywhere,
            and an index twice.
        ends, starts: [T] int32, clamped to [0, N], default N and 0; ends ≤ starts is an empty row.
        softmax_scale: Factor of q · row, natural base.

    Returns:
        target: [T, K] float32, every element written.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
        UnsupportedError: H > 128, or an argument is differentiated: the target is a constant (DeepSeek-V3.2's
            technical report).

    Numerics: scores, probabilities and sums in float32.

    Example:
        >>> q, rows = xp.zeros((1, 2, 64), dtype=xp.bfloat16), xp.ones((3, 64), dtype=xp.bfloat16)
        >>> lse, indices = xp.zeros((1, 2)), xp.asarray([[0, -1]], dtype=xp.int32)
        >>> ops.indexer_target(q, rows, lse, indices, softmax_scale=0.1).tolist()
        [[2.0, 0.0]]
    """


def work(problem: Problem, keys: float | None) -> Work:
    flops = 2.0 * problem["T"] * problem["K"] * problem["H"] * problem["L+E"]
    return Work(problem.nbytes, bf16_flops=flops)


OP = Op(
    prototype=indexer_target,
    tensors={
        "q": Tensor("T H L+E", HALVES),
        "rows": Tensor("N L+E", HALVES),
        "lse": Tensor("T H", F32),
        "indices": Tensor("T K", INDEX, index_of="N"),
        "ends": Tensor("T", INDEX, bound_of="N"),
        "starts": Tensor("T", INDEX, bound_of="N"),
    },
    outputs={"target": Result("T K", "float32", agreement=PROBABILITIES)},
    check=check_attention,
    work=work,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
