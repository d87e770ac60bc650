from typing import Any

from xmla.core.checks import Limit
from xmla.core.op import E4M3, F32, INDEX, Op, Problem, Tensor
from xmla.core.ops.indexer_logits.cases import CASES
from xmla.core.ops.indexer_logits.plan import plan
from xmla.core.ops.indexer_logits.reference import reference
from xmla.core.ops.write_indexer_cache import INDEXER_DIMS
from xmla.core.spec import Spec


def indexer_logits(q8, weights, keys, key_scales, starts, ends) -> Any:
    """Lightning-indexer logits of ragged queries over contiguous keys (prefill).

        logits[t,n] = key_scales[n] · Σ_i relu(q8[t,i] · keys[n]) · weights[t,i]     for starts[t] ≤ n < ends[t]
        logits[t,n] = −inf                                                           elsewhere

    Args:
        q8: [T, I, D] float8_e4m3fn, D of 32, 64 or 128, I ≤ 128 (`quantize_indexer_query`).
        weights: [T, I] float32, scales of q folded in. May be negative.
        keys: [N, D] float8_e4m3fn, of all requests one after another (`read_indexer_cache`).
        key_scales: [N] float32, any values.
        starts, ends: [T] int32, clamped to [0, N]; ends ≤ starts is an empty row. Keys outside every row's range do
            not influence the result.

    Returns:
        logits: [T, N] float32, every element written.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
        UnsupportedError: I > 128.

    Numerics: fp8 products accumulated in the tensor cores, then float32. The formula is that of DeepSeek-V3.2-Exp's
    indexer and of DeepGEMM's fp8_mqa_logits with clean_logits.
    """


def check_query(problem: Problem) -> None:
    """Rules of the quantised indexer query."""
    if problem["D"] not in INDEXER_DIMS:
        problem.refuse("q8", "axis D (axis 2)", problem["D"], "32, 64 or 128")
    if problem["I"] > 128:
        problem.unsupported("q8", "axis I (axis 1)", problem["I"], "at most 128 indexer heads")


OP = Op(
    prototype=indexer_logits,
    tensors={
        "q8": Tensor("T I D", E4M3),
        "weights": Tensor("T I", F32),
        "keys": Tensor("N D", E4M3),
        "key_scales": Tensor("N", F32),
        "starts": Tensor("T", INDEX),
        "ends": Tensor("T", INDEX),
    },
    outputs={"logits": lambda p: Spec((p["T"], p["N"]), "float32")},
    check=check_query,
    limits=lambda p, arrays: (Limit("starts", 0, p["N"]), Limit("ends", 0, p["N"])),
    plan=plan,
    reference=reference,
    cases=CASES,
)
