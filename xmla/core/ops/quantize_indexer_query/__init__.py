from typing import Any

from xmla.core.op import FLOATS, Op, Problem, Tensor
from xmla.core.ops.quantize_indexer_query.cases import CASES
from xmla.core.ops.quantize_indexer_query.plan import plan
from xmla.core.ops.quantize_indexer_query.reference import reference
from xmla.core.ops.write_indexer_cache import INDEXER_DIMS
from xmla.core.spec import Spec


def quantize_indexer_query(q, weights, *, scale: float | None = None) -> Any:
    """Quantise indexer queries to fp8, one scale a head, and fold that scale into the head's weight.

        s[t,i] = 2 ** max(ceil(log2(max|q[t,i]| / 448)), -22)
        q8[t,i] = e4m3(q[t,i] / s[t,i]);      folded[t,i] = weights[t,i] · s[t,i] · scale

    The indexer's logit is Σ_i relu(q_i · k) · w_i and s > 0, so relu(s x) = s relu(x): folding only rounds the weight.

    Args:
        q: [T, I, D] bfloat16, float16 or float32, D of 32, 64 or 128, I ≤ 128. Roped.
        weights: [T, I], any of the same dtypes: weights_proj(x), unscaled.
        scale: Further factor of the weights, default D**-0.5 · I**-0.5 as in DeepSeek-V3.2.

    Returns:
        q8: [T, I, D] float8_e4m3fn.
        folded_weights: [T, I] float32.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
        UnsupportedError: I > 128.
    """


def check(problem: Problem) -> None:
    if problem["D"] not in INDEXER_DIMS:
        problem.refuse("q", "axis D (axis 2)", problem["D"], "32, 64 or 128")
    if problem["I"] > 128:
        problem.unsupported("q", "axis I (axis 1)", problem["I"], "at most 128 indexer heads")


OP = Op(
    prototype=quantize_indexer_query,
    tensors={"q": Tensor("T I D", FLOATS), "weights": Tensor("T I", FLOATS)},
    outputs={
        "q8": lambda p: Spec((p["T"], p["I"], p["D"]), "float8_e4m3fn"),
        "folded_weights": lambda p: Spec((p["T"], p["I"]), "float32"),
    },
    check=check,
    plan=plan,
    reference=reference,
    cases=CASES,
)
