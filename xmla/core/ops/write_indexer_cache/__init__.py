from typing import Any

from xmla.core.checks import Limit
from xmla.core.op import BYTES, FLOATS, Op, Problem, Tensor
from xmla.core.ops.write_indexer_cache.cases import CASES
from xmla.core.ops.write_indexer_cache.plan import plan
from xmla.core.ops.write_indexer_cache.reference import reference

INDEXER_DIMS = (32, 64, 128)


def write_indexer_cache(keys, slots, cache) -> Any:
    """Quantise indexer keys to fp8 and insert them into the paged indexer cache, in place.

        scale = 2 ** max(ceil(log2(max|key| / 448)), -22);    values = e4m3(key / scale)

    Args:
        keys: [T, D] bfloat16, float16 or float32, D of 32, 64 or 128. Normalised and roped.
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) is skipped. Valid slots must be distinct.
        cache: [P, R, D+4] uint8, int8 or float8_e4m3fn; any page size, page stride a multiple of 4 bytes. Within a
            page stand first the R · D values, then R float32 scales: the last axis counts bytes an entry, not places.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    The layout is that of DeepGEMM, vLLM and SGLang; the scale rule that of DeepSeek-V3.2-Exp's act_quant (amax floored
    at 1e-4, rounded up to a power of two). Rounding: to nearest even, saturating; NaN stays NaN.
    """


def check_indexer_cache(problem: Problem) -> None:
    """Rules of an indexer cache argument named `cache`, whose row is the D values and 4 bytes of scale."""
    if problem["D"] not in INDEXER_DIMS:
        problem.refuse("keys" if problem.has("keys") else "q", "axis D (the last)", problem["D"], "32, 64 or 128")
    if problem["ROW"] != problem["D"] + 4:
        problem.refuse("cache", "axis ROW (axis 2)", problem["ROW"], f"{problem['D'] + 4} (D + 4)")
    check_indexer_pages(problem)


def check_indexer_pages(problem: Problem) -> None:
    problem.require_dense_entries("cache")
    if problem.specs["cache"].stride(0) % 4:
        problem.refuse("cache", "stride of axis P (axis 0)", problem.specs["cache"].stride(0), "a multiple of 4 bytes")


OP = Op(
    prototype=write_indexer_cache,
    tensors={
        "keys": Tensor("T D", FLOATS),
        "slots": Tensor("T", ("int32", "int64")),
        "cache": Tensor("P R ROW", BYTES),
    },
    outputs={},
    mutates=("cache",),
    check=check_indexer_cache,
    limits=lambda p, arrays: (Limit("slots", -1, p["P"] * p["R"] - 1),),
    plan=plan,
    reference=reference,
    cases=CASES,
)
