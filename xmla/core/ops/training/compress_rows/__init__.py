from typing import Any

from xmla.core.call import F32, FLOATS, INDEX, Problem, Result, Tensor, Work
from xmla.core.op import Op
from xmla.core.ops.training.compress_rows import backward
from xmla.core.ops.training.compress_rows.cases import CASES
from xmla.core.ops.training.compress_rows.check import check_rows, dims_of
from xmla.core.ops.training.compress_rows.plan import plan
from xmla.core.ops.training.compress_rows.reference import reference
from xmla.core.plan import Implementation
from xmla.core.values import PROBABILITIES


def compress_rows(kv, score, ape, positions, norm_weight=None, cos_sin=None, *, eps: float = 1e-6) -> Any:
    """Compressed entries of whole documents as rows, as in training: what `compress_kv` and `pool_keys` quantise.

        for every token with (p + 1) mod r = 0, j = p div r, o = C − 1:              p = positions[n]
        w[d]      = softmax over rows q of score + ape[q mod r]                      for each dim d separately
        pooled[d] = Σ_q w[q,d] · kv[q,d]          q = (j − o)·r … (j + 1)·r − 1, from series 0 where q < j·r, else o
        normed    = pooled / sqrt(mean(pooled²) + eps) · norm_weight
        rows[n]   = normed, the pairs (2i, 2i+1) of its last E dims rotated by cos_sin[j·r]

    The tokens of a document are adjacent, and their positions rise by one; several documents may follow each other. Row
    q of a window is the token n − (p − q). One that has another position, or is not there, is left out.

    Args:
        kv, score: [N, C·D] bfloat16, float16 or float32: a token's two projections, C = 1 or 2. D = 32, 64, 128 or 512.
        ape: [r, C·D] float32, added to a token's score by the token's place in its group.
        positions: [N] int32, each token's position in its document. A negative one marks padding.
        norm_weight: [D] bfloat16, float16 or float32. Without it C = 1 and normed = pooled, as in `pool_keys`.
        cos_sin: [S, E] bfloat16, float16 or float32: for each position E / 2 cosines, then E / 2 sines. An entry whose
            position is not in it has a row of zeros. Without it nothing is rotated.
        eps: Added to the mean square.

    Returns:
        rows: [N, D] float32: an entry where the token that completes it stands, else 0.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    `sparse_mla` attends to the rows, in q's dtype, as pages of one entry: a slot is then the place of the token that
    completes the entry. Beside entries that `compress_kv` quantised they are its `rows`, or `extra_rows`.

    Numerics: float32; `compress_kv` computes the same before it rounds, up to the order of a window's sum. Gradients
    are sums of float32 in one order, so that the same arguments give the same bits.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> kv, score, ape = xp.ones((4, 32)), xp.zeros((4, 32)), xp.zeros((2, 32))
        >>> rows = ops.compress_rows(kv, score, ape, xp.arange(4, dtype=xp.int32), xp.ones(32), eps=0.0)
        >>> rows[:, 0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """


def work(problem: Problem, keys: float | None) -> Work:
    return Work(problem.nbytes)


OP = Op(
    prototype=compress_rows,
    tensors={
        "kv": Tensor("N C·D", FLOATS),
        "score": Tensor("N C·D", FLOATS),
        "ape": Tensor("r C·D", F32),
        "positions": Tensor("N", INDEX),
        "norm_weight": Tensor("D", FLOATS),
        "cos_sin": Tensor("S E", FLOATS),
    },
    outputs={"rows": Result("N D", "float32", sizes={"D": dims_of}, agreement=PROBABILITIES)},
    check=check_rows,
    work=work,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
    derivative=backward.OP,
)
