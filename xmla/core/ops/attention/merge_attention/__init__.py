from typing import Any

from xmla.core.call import F32, FLOATS, Problem, Result, Tensor
from xmla.core.op import Op
from xmla.core.ops.attention.merge_attention.cases import CASES
from xmla.core.ops.attention.merge_attention.plan import plan
from xmla.core.ops.attention.merge_attention.reference import reference
from xmla.core.plan import Implementation
from xmla.core.values import ATTENTION_LSE, ATTENTION_OUT


def merge_attention(outs, lses, sink=None, *, empty_lse: str = "-inf") -> Any:
    """Attention over a set of keys, merged from attention over disjoint parts of it, such as the keys of each rank.

        lse[t,h] = ln Σ_w exp(lses[w,t,h])
        out[t,h] = Σ_w exp(lses[w,t,h]) · outs[w,t,h] / (exp(lse[t,h]) + exp(sink[h]))

    Args:
        outs: [W, T, H, L] bfloat16, float16 or float32, out of `sparse_mla` for each part, computed without a sink.
        lses: [W, T, H] float32, natural log. −inf, or +inf as in FlashMLA, marks a part without keys: its out is not
            read.
        sink: [H] float32, as in `sparse_mla`.
        empty_lse: "-inf" or "+inf", the lse of a row that has no keys in any part.

    Returns:
        out: [T, H, L], dtype of outs; 0 for a row that has no keys in any part.
        lse: [T, H] float32, natural log, without the sink.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; W is 0.

    Numerics: sums in float32, in the order of the parts. A single part without a sink is returned unchanged. The rule
    is FlashAttention's for split keys.

    Example:
        >>> outs, lses = xp.asarray([[[[1.0, 5.0]]], [[[3.0, 7.0]]]]), xp.zeros((2, 1, 1))
        >>> out, lse = ops.merge_attention(outs, lses)
        >>> out.tolist(), round(float(lse[0, 0]), 3)
        ([[[2.0, 6.0]]], 0.693)
    """


def check(problem: Problem) -> None:
    if problem["W"] < 1:
        problem.refuse("outs", "axis W (axis 0)", problem["W"], "at least 1")
    if problem.attrs.empty_lse not in ("-inf", "+inf"):
        problem.refuse("empty_lse", "value", repr(problem.attrs.empty_lse), "'-inf' or '+inf'")


OP = Op(
    prototype=merge_attention,
    tensors={"outs": Tensor("W T H L", FLOATS), "lses": Tensor("W T H", F32), "sink": Tensor("H", F32)},
    outputs={
        "out": Result("T H L", lambda p: p.specs["outs"].dtype, agreement=ATTENTION_OUT),
        "lse": Result("T H", "float32", agreement=ATTENTION_LSE),
    },
    check=check,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
