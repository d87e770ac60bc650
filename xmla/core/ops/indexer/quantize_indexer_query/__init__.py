from typing import Any

from xmla.core.call import FLOATS, Problem, Result, Tensor, check_indexer_dim
from xmla.core.formats.indexer import QUERY_FORMATS, IndexerLayout
from xmla.core.op import Op
from xmla.core.ops.indexer.quantize_indexer_query.cases import CASES
from xmla.core.ops.indexer.quantize_indexer_query.plan import plan
from xmla.core.ops.indexer.quantize_indexer_query.reference import reference
from xmla.core.ops.indexer.shared import check_heads
from xmla.core.plan import Implementation
from xmla.core.values import FLOAT32


def quantize_indexer_query(q, weights, *, scale: float | None = None, format: str = "fp8") -> Any:
    """Quantise indexer queries to fp8, with one scale per head folded into the head's weight, or to MXFP4.

        s[t,i] = 2 ** max(ceil(log2(max|q[t,i]| / 448)), -22)
        q8[t,i] = e4m3(q[t,i] / s[t,i]);      folded[t,i] = weights[t,i] · s[t,i] · scale                       (fp8)
        q8[t,i] = mxfp4(q[t,i]);              folded[t,i] = weights[t,i] · scale                              (mxfp4)

    The indexer's logit is Σ_i relu(q_i · k) · w_i and s > 0, so relu(s x) = s relu(x): folding only rounds the weight.
    MXFP4 has one scale per 32 dims, which cannot be factored out of the dot product. The op then returns the rounded
    values themselves, in bfloat16, which holds them exactly.

    Args:
        q: [T, I, D] bfloat16, float16 or float32, D = 32, 64 or 128, 1 ≤ I ≤ 128. Roped and rotated as the keys are: by
            a Hadamard transform, as in DeepSeek's reference and SGLang, or by none, as in vLLM.
        weights: [T, I], any of the same dtypes: weights_proj(x), unscaled.
        scale: Further factor of the weights, default D**-0.5 · I**-0.5 as in DeepSeek-V3.2.
        format: "fp8", or "mxfp4" (rounded as in `write_indexer_cache`) for keys in MXFP4. DeepSeek-V4's indexer was
            trained with mxfp4, and DeepGEMM and vLLM compute it. Keys in MXFP4 take fp8 queries as well.

    Returns:
        q8: [T, I, D] float8_e4m3fn, or bfloat16 (mxfp4).
        folded_weights: [T, I] float32.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or format is wrong.
        UnsupportedError: I > 128.

    Example:
        >>> q8, folded_weights = ops.quantize_indexer_query(xp.ones((1, 2, 32)), xp.ones((1, 2)), scale=1.0)
        >>> float(q8[0, 0, 0]), folded_weights.tolist()
        (256.0, [[0.00390625, 0.00390625]])
    """


def check(problem: Problem) -> None:
    check_indexer_dim(problem)
    if problem.attrs.format not in QUERY_FORMATS:
        problem.refuse("format", "value", repr(problem.attrs.format), " or ".join(map(repr, QUERY_FORMATS)))
    check_heads(problem, "q")


OP = Op(
    prototype=quantize_indexer_query,
    tensors={"q": Tensor("T I D", FLOATS), "weights": Tensor("T I", FLOATS)},
    outputs={
        "q8": Result("T I D", lambda p: IndexerLayout(p["D"], p.attrs.format).query_dtype),
        "folded_weights": Result("T I", "float32", agreement=FLOAT32),
    },
    check=check,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
