from typing import Any

from xmla.core.checks import Limit
from xmla.core.layout import IndexerLayout
from xmla.core.op import BYTES, E4M3, F32, INDEX, Op, Problem, Tensor
from xmla.core.ops.indexer_logits.cases import CASES
from xmla.core.ops.indexer_logits.plan import keys_are_mxfp4, plan
from xmla.core.ops.indexer_logits.reference import reference
from xmla.core.ops.write_indexer_cache import check_dim
from xmla.core.spec import Spec


def indexer_logits(q8, weights, keys, key_scales, starts, ends) -> Any:
    """Lightning-indexer logits of ragged queries over contiguous keys (prefill).

        logits[t,n] = Σ_i relu(q8[t,i] · key[n]) · weights[t,i]                      for starts[t] ≤ n < ends[t]
        logits[t,n] = −inf                                                           elsewhere

    Args:
        q8: [T, I, D] float8_e4m3fn, D of 32, 64 or 128, I ≤ 128 (`quantize_indexer_query`); over MXFP4 keys also
            bfloat16.
        weights: [T, I] float32, scales of q folded in. May be negative.
        keys: Of all requests one after another (`read_indexer_cache`): [N, D] float8_e4m3fn, or MXFP4: [N, D/2] uint8
            or int8, two e2m1 a byte, the even dim in the low nibble.
        key_scales: [N] float32, any values, which multiply the logit; MXFP4: [N] int32, a UE8M0 byte a block of 32
            dims, the first in the lowest byte.
        starts, ends: [T] int32, clamped to [0, N]; ends ≤ starts is an empty row. Keys outside every row's range do
            not influence the result.

    Returns:
        logits: [T, N] float32, every element written.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.
        UnsupportedError: I > 128.

    Numerics: products accumulated in the tensor cores, then float32; fp8 products for fp8 keys, bfloat16 ones for
    MXFP4, where keys, scales and queries are exact, but keys of 2**128 and more, for which e2m1 · 2**127 has room, are
    infinite. The formula is that of DeepSeek-V3.2-Exp's indexer, of DeepGEMM's
    fp8_mqa_logits with clean_logits and of its fp4 variant.

    Bits may differ where an array starts on another address modulo 16 bytes.
    """


QUERY = Tensor("T I D", (*E4M3, "bfloat16"))


def check_query(problem: Problem) -> None:
    """Rules of the quantised indexer query."""
    check_dim(problem, "q8", "axis D (axis 2)")
    if problem["I"] > 128:
        problem.unsupported("q8", "axis I (axis 1)", problem["I"], "at most 128 indexer heads")


def check_query_dtype(problem: Problem) -> None:
    """Only keys in MXFP4 are multiplied in bfloat16."""
    if problem.specs["q8"].dtype not in E4M3 and not keys_are_mxfp4(problem):
        problem.refuse("q8", "dtype", problem.specs["q8"].dtype, "float8_e4m3fn for fp8 keys")


def check_keys(problem: Problem) -> None:
    """Rules of the query and of contiguous keys, whose dtype tells their format."""
    check_query(problem)
    layout = IndexerLayout(problem["D"], "mxfp4" if keys_are_mxfp4(problem) else "fp8")
    if problem["ROW"] != layout.value_bytes:
        width = f"{layout.value_bytes} ({'D/2' if layout.format == 'mxfp4' else 'D'})"
        problem.refuse("keys", "axis ROW (axis 1)", problem["ROW"], f"{width} of {problem.specs['keys'].dtype}")
    if problem.specs["key_scales"].dtype != layout.dtypes[1]:
        expected = f"{layout.dtypes[1]} beside keys of {problem.specs['keys'].dtype}"
        problem.refuse("key_scales", "dtype", problem.specs["key_scales"].dtype, expected)
    check_query_dtype(problem)


OP = Op(
    prototype=indexer_logits,
    tensors={
        "q8": QUERY,
        "weights": Tensor("T I", F32),
        "keys": Tensor("N ROW", BYTES),
        "key_scales": Tensor("N", ("float32", "int32")),
        "starts": Tensor("T", INDEX, bound_of="N"),
        "ends": Tensor("T", INDEX, bound_of="N"),
    },
    outputs={"logits": lambda p: Spec((p["T"], p["N"]), "float32")},
    check=check_keys,
    limits=lambda p, arrays: (Limit("starts", 0, p["N"]), Limit("ends", 0, p["N"])),
    plan=plan,
    implementations=("triton", "gluon"),
    reference=reference,
    cases=CASES,
)
