from collections.abc import Callable, Mapping
from typing import Any

from xmla.core.call import F32, HALVES, INDEX, Problem, Result, Tensor, Work
from xmla.core.op import Op
from xmla.core.ops.training.indexer_scores import backward
from xmla.core.ops.training.indexer_scores.cases import CASES
from xmla.core.ops.training.indexer_scores.check import check_scores
from xmla.core.ops.training.indexer_scores.plan import num_columns, plan
from xmla.core.ops.training.indexer_scores.reference import reference
from xmla.core.plan import Implementation
from xmla.core.values import SCORES, Attributes


def indexer_scores(q, k, weights, ends=None, starts=None, indices=None) -> Any:
    """Scores of a lightning indexer over 16-bit keys, as in training: over a range of keys, or at selected ones.

        n(t,c)      = indices[t,c], without indices c                                the key of a column
        S[t]        = { c : starts[t] ≤ n(t,c) < ends[t] }                           the valid columns
        scores[t,c] = Σ_i weights[t,i] · relu(q[t,i] · k[n(t,c)])                    for c in S[t], else −inf

    Args:
        q: [T, I, D] bfloat16 or float16, D = 32, 64 or 128, 1 ≤ I ≤ 64.
        k: [N, D], dtype of q. Keys of no valid column are never read.
        weights: [T, I] float32. May be negative.
        ends, starts: [T] int32, clamped to [0, N], default N and 0; ends ≤ starts is an empty row. In a batch of packed
            documents the range of a token's own document.
        indices: [T, K] int32. A column whose index is outside its token's range is not valid; −1 may stand anywhere,
            and an index twice.

    Returns:
        scores: [T, COLUMNS] float32, COLUMNS = K with indices, else N; every element written.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
        UnsupportedError: I > 64.

    Numerics: products summed in float32. The formula is that of DeepSeek-V3.2's technical report, with all factors in
    the weights. The derivative of relu at 0 is 0. Gradients are products of operands in q's dtype (float16: TF32),
    summed in float32. The sums of k's over tokens are exact to the last bit of a unit that the key's greatest summand
    sets, so that the same arguments give the same bits. A key's whole gradient is NaN if a query, weight or gradient of
    one of its summands is not finite.

    Example:
        >>> q, k = xp.ones((1, 2, 32), dtype=xp.bfloat16), xp.ones((3, 32), dtype=xp.bfloat16)
        >>> ops.indexer_scores(q, k, xp.ones((1, 2)), xp.asarray([2], dtype=xp.int32)).tolist()
        [[64.0, 64.0, -inf]]
    """


def work(problem: Problem, keys: float | None) -> Work:
    flops = 2.0 * problem["T"] * num_columns(problem) * problem["I"] * problem["D"]
    return Work(problem.nbytes, bf16_flops=flops)


def batch(xp: Any, call: Callable[..., Any], arrays: Mapping[str, Any], _: Attributes) -> tuple[Any, ...]:
    """Batched calls with separate keys, one after another: folded, a row would have the columns of all."""
    found = [call("indexer_scores", {n: a[at] for n, a in arrays.items()}) for at in range(len(arrays["k"]))]
    return (xp.stack([scores for (scores,) in found]),)


OP = Op(
    prototype=indexer_scores,
    tensors={
        "q": Tensor("T I D", HALVES),
        "k": Tensor("N D", HALVES),
        "weights": Tensor("T I", F32),
        "ends": Tensor("T", INDEX, bound_of="N"),
        "starts": Tensor("T", INDEX, bound_of="N"),
        "indices": Tensor("T K", INDEX, index_of="N"),
    },
    outputs={"scores": Result("T COLUMNS", "float32", sizes={"COLUMNS": num_columns}, agreement=SCORES)},
    check=check_scores,
    work=work,
    batch=batch,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
    derivative=backward.OP,
)
