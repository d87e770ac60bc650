from typing import Any

from xmla.core.call import F32, HALVES, INDEX, Problem, Result, Tensor, Work
from xmla.core.op import Op
from xmla.core.ops.training.indexer_loss import backward
from xmla.core.ops.training.indexer_loss.cases import CASES
from xmla.core.ops.training.indexer_loss.plan import plan
from xmla.core.ops.training.indexer_loss.reference import reference
from xmla.core.ops.training.indexer_scores.check import check_scores
from xmla.core.ops.training.indexer_scores.plan import num_columns
from xmla.core.ops.training.indexer_target.check import check_attention
from xmla.core.plan import Implementation
from xmla.core.values import GRADIENT, PROBABILITIES


def indexer_loss(
    index_q, index_k, index_weights, q=None, rows=None, lse=None, ends=None, starts=None, indices=None, target=None, *,
    softmax_scale: float | None = None, coeff: float = 1.0, workspace_bytes: int = 1 << 29,
) -> Any:  # fmt: skip
    """The loss that trains a lightning indexer, KL(attention's probabilities ‖ the indexer's), and its gradients.

        n(t,c)   = indices[t,c], without indices c                                   the key of a column
        S[t]     = { c : starts[t] ≤ n(t,c) < ends[t] }                              the valid columns
        I[t,c]   = Σ_i index_weights[t,i] · relu(index_q[t,i] · index_k[n(t,c)])
        p[t,c]   = exp(I[t,c]) / Σ exp(I[t,c'])                                      the prediction; sums over S[t]
        g[t,c]   = target[t,c], without target Σ_h exp(softmax_scale · q[t,h] · rows[n(t,c)] − lse[t,h])
        ĝ[t,c]   = g[t,c] / Σ g[t,c']
        loss     = coeff / T · Σ_t Σ_c ĝ[t,c] · (ln max(ĝ[t,c], 1e-10) − ln p[t,c])
        dI[t,c]  = coeff / T · (p[t,c] − ĝ[t,c])         whose gradients of index_q, index_k and index_weights are those
                                                                                              of `indexer_scores`

    Without indices all keys of a range count: the indexer's warm-up. With them the selected keys alone. A token whose g
    sums up to 0, as one without keys, adds nothing to the loss and has gradients of 0. ln p[t,c] is computed as
    I[t,c] − ln Σ exp(I[t,c']), so that it is finite where p[t,c] rounds to 0. A column whose ĝ is 0 adds 0.

    Args:
        index_q: [T, I, D] bfloat16 or float16, D = 32, 64 or 128, 1 ≤ I ≤ 64.
        index_k: [N, D], dtype of index_q. What keys of no valid column hold does not matter; their rows are never read.
        index_weights: [T, I] float32.
        q: [T, H, L+E] bfloat16 or float16, H ≤ 128, L+E a multiple of 64: attention's queries.
        rows: [N, L+E], dtype of q: attention's plain rows, flat, at the same places as the indexer's keys.
        lse: [T, H] float32: attention's own, over the same keys, natural, without a sink. A head whose lse is infinite
            has no keys and adds 0.
        ends, starts: [T] int32, clamped to [0, N], default N and 0; ends ≤ starts is an empty row. In a batch of packed
            documents the range of a token's own document.
        indices: [T, K] int32. A column whose index is outside its token's range is not valid; −1 may stand anywhere. An
            index that stands twice is two columns.
        target: [T, K] float32, not negative, instead of q, rows and lse: `indexer_target`, summed over the ranks that
            share attention's heads. Read only in valid columns.
        softmax_scale: Factor of q · row; given if and only if q is.
        coeff: Factor of the loss.
        workspace_bytes: The most device memory to use besides the results: as many tokens at a time as fit. The bits of
            the results do not depend on it.

    Returns:
        loss: [1] float32, divided by all T tokens.
        dindex_q: [T, I, D], dtype of index_q.
        dindex_k: [N, D], dtype of index_k; 0 for a key of no valid column.
        dindex_weights: [T, I] float32.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; target is given beside q, rows, lse or softmax_scale, or
            without indices; one of these four is missing without target.
        UnsupportedError: I > 64 or H > 128; workspace_bytes is too small; another argument than index_q, index_k and
            index_weights is differentiated.

    A token is multiplied with its own columns; on Hopper, in bfloat16 and for I ≥ 17, with all keys of its range. With
    indices that is from its least key to its greatest, where 2 · N − min(T, N) ≤ 6 · K. By columns the workspace is
    12 · T bytes, and (8 · D + 5) · N bytes for the sums of dindex_k. Without target there are 4 · K bytes more, without
    indices 4 · N, for each of at most T tokens and at least a 4096-th of them. By ranges it is 17 · T bytes, N / 64,
    and at most 4 · D · max(N, 65536) for the sums. For each of at most T tokens, and at least 64 or an 8192-th, there
    are 4 · N bytes more, with indices 4 · K, and as much again for the target as by columns.
    By columns the sums are exact to the last bit of a unit that the key's greatest summand sets, so that the order of
    tokens does not matter. By ranges they are of float32, in the order of tokens. The same arguments give the same
    bits.

    The formula is that of DeepSeek-V3.2's technical report. Attention's q, rows and lse are constants, the gradients
    are the loss's own: its derivative multiplies them by the gradient of the loss.

    Numerics: scores, probabilities and sums in float32; gradients as of `indexer_scores`. In float16 a
    gradient below 2**-24, of which coeff / T is a factor, is 0; bfloat16 has no such limit. A target or prediction that
    is not finite makes its token's gradients, its keys' and the loss NaN.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q, k = xp.zeros((1, 2, 32), dtype=xp.bfloat16), xp.ones((3, 32), dtype=xp.bfloat16)
        >>> indices, target = xp.asarray([[0, 2]], dtype=xp.int32), xp.asarray([[1.0, 0.0]])
        >>> loss, *gradients = ops.indexer_loss(q, k, xp.ones((1, 2)), indices=indices, target=target)
        >>> round(float(loss[0]), 3)  # ln 2: of two keys alike one is the target
        0.693
    """


def check(problem: Problem) -> None:
    check_scores(problem, "index_q", "index_k")
    if problem.has("target") and not problem.has("indices"):
        problem.refuse("target", "argument", "given", "none without indices")
    attention = ("q", "rows", "lse")
    for name in attention:
        if problem.has("target") and problem.has(name):
            problem.refuse(name, "argument", "given", "none beside target")
        if not problem.has("target") and not problem.has(name):
            problem.refuse(name, "argument", "missing", "an array, or target")
    scale = problem.attrs.softmax_scale
    if problem.has("target"):
        if scale is not None:
            problem.refuse("softmax_scale", "value", scale, "None beside target")
        return
    if scale is None:
        problem.refuse("softmax_scale", "value", None, "a float beside q")
    check_attention(problem)


def work(problem: Problem, keys: float | None) -> Work:
    """Scores in both passes, the target once, and the products of two gradients."""
    pairs = problem["T"] * num_columns(problem)
    flops = 8.0 * pairs * problem["I"] * problem["D"]
    if problem.has("q"):
        flops += 2.0 * pairs * problem["H"] * problem["L+E"]
    return Work(problem.nbytes, bf16_flops=flops)


OP = Op(
    prototype=indexer_loss,
    tensors={
        "index_q": Tensor("T I D", HALVES),
        "index_k": Tensor("N D", HALVES),
        "index_weights": Tensor("T I", F32),
        "q": Tensor("T H L+E", HALVES),
        "rows": Tensor("N L+E", HALVES),
        "lse": Tensor("T H", F32),
        "ends": Tensor("T", INDEX, bound_of="N"),
        "starts": Tensor("T", INDEX, bound_of="N"),
        "indices": Tensor("T K", INDEX, index_of="N"),
        "target": Tensor("T K", F32),
    },
    outputs={
        "loss": Result("LOSS", "float32", sizes={"LOSS": lambda p: 1}, agreement=PROBABILITIES),
        "dindex_q": Result("T I D", lambda p: p.specs["index_q"].dtype, agreement=GRADIENT),
        "dindex_k": Result("N D", lambda p: p.specs["index_k"].dtype, agreement=GRADIENT),
        "dindex_weights": Result("T I", "float32", agreement=GRADIENT),
    },
    check=check,
    work=work,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
    derivative=backward.OP,
)
