from typing import Any

from xmla.core.layout import INDEXER_FORMATS
from xmla.core.op import FLOATS, Op, Problem, Tensor
from xmla.core.ops.quantize_indexer_query.cases import CASES
from xmla.core.ops.quantize_indexer_query.plan import plan
from xmla.core.ops.quantize_indexer_query.reference import reference
from xmla.core.ops.write_indexer_cache import check_dim
from xmla.core.spec import Spec


def quantize_indexer_query(q, weights, *, scale: float | None = None, format: str = "fp8") -> Any:
    """Quantise indexer queries: to fp8 with one scale a head, folded into the head's weight, or to MXFP4.

        s[t,i] = 2 ** max(ceil(log2(max|q[t,i]| / 448)), -22)
        q8[t,i] = e4m3(q[t,i] / s[t,i]);      folded[t,i] = weights[t,i] · s[t,i] · scale                       (fp8)
        q8[t,i] = mxfp4(q[t,i]);              folded[t,i] = weights[t,i] · scale                              (mxfp4)

    The indexer's logit is Σ_i relu(q_i · k) · w_i and s > 0, so relu(s x) = s relu(x): folding only rounds the weight.
    MXFP4 has a scale each 32 dims, which cannot leave the dot product: the rounded values themselves come out, in
    bfloat16, which holds every one of them exactly.

    Args:
        q: [T, I, D] bfloat16, float16 or float32, D of 32, 64 or 128, I ≤ 128. Roped.
        weights: [T, I], any of the same dtypes: weights_proj(x), unscaled.
        scale: Further factor of the weights, default D**-0.5 · I**-0.5 as in DeepSeek-V3.2.
        format: "fp8", or "mxfp4" (rounded as `write_indexer_cache` does) for keys in MXFP4: so was DeepSeek-V4's
            indexer trained, and DeepGEMM and vLLM compute it. Keys in MXFP4 take fp8 queries as well.

    Returns:
        q8: [T, I, D] float8_e4m3fn, or bfloat16 (mxfp4).
        folded_weights: [T, I] float32.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or format is wrong.
        UnsupportedError: I > 128.
    """


def check(problem: Problem) -> None:
    check_dim(problem, "q", "axis D (axis 2)")
    if problem.attrs["format"] not in INDEXER_FORMATS:
        problem.refuse("format", "value", repr(problem.attrs["format"]), " or ".join(map(repr, INDEXER_FORMATS)))
    if problem["I"] > 128:
        problem.unsupported("q", "axis I (axis 1)", problem["I"], "at most 128 indexer heads")


QUERY_DTYPES = {"fp8": "float8_e4m3fn", "mxfp4": "bfloat16"}

OP = Op(
    prototype=quantize_indexer_query,
    tensors={"q": Tensor("T I D", FLOATS), "weights": Tensor("T I", FLOATS)},
    outputs={
        "q8": lambda p: Spec((p["T"], p["I"], p["D"]), QUERY_DTYPES[p.attrs["format"]]),
        "folded_weights": lambda p: Spec((p["T"], p["I"]), "float32"),
    },
    check=check,
    plan=plan,
    reference=reference,
    cases=CASES,
)
