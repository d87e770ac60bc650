from typing import Any

from xmla.core.checks import Limit
from xmla.core.layout import INDEXER_DIMS, indexer_layouts, indexer_rows
from xmla.core.op import BYTES, FLOATS, Op, Problem, Tensor
from xmla.core.ops.write_indexer_cache.cases import CASES
from xmla.core.ops.write_indexer_cache.plan import plan
from xmla.core.ops.write_indexer_cache.reference import reference


def write_indexer_cache(keys, slots, cache) -> Any:
    """Quantise indexer keys and insert them into the paged indexer cache, in place, in the format that its rows have.

        fp8:    scale = 2 ** max(ceil(log2(max|key| / 448)), -22);     values = e4m3(key / scale)
        mxfp4:  scale = 2 ** max(ceil(log2(max|block| / 6)), -126);    values = e2m1(block / scale), blocks of 32 dims

    Args:
        keys: [T, D] bfloat16, float16 or float32, D of 32, 64 or 128. Normalised and roped.
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) is skipped. Valid slots must be distinct.
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn; ROW is D+4 (fp8) or D/2+4 (mxfp4). Any page size, pages start
            on multiples of 4 bytes. Within a page stand first the values of all R entries, then 4 bytes each of scales:
            the last axis counts bytes an entry, not places. mxfp4: two dims a byte, the even one in the low nibble;
            scale bytes UE8M0, one a block, those that D leaves unused 127.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    Layouts of DeepGEMM, vLLM and SGLang. Scale rules: DeepSeek-V3.2-Exp's act_quant (amax floored at 1e-4, rounded up
    to a power of two); vLLM's fp4 writer (amax floored at 6 · 2**-126). Rounding: to nearest, ties to even, saturating;
    −0 keeps its sign. NaN stays NaN: in mxfp4, which has none, its block gets the scale 255 and all of it is NaN.
    """


def check_indexer_cache(problem: Problem) -> None:
    """Rules of an indexer cache argument named `cache` and of the D that its rows hold."""
    check_dim(problem, "keys", "axis D (the last)")
    check_indexer_row(problem, "cache", "ROW")
    check_indexer_pages(problem)


def check_dim(problem: Problem, argument: str, axis: str) -> None:
    if problem["D"] not in INDEXER_DIMS:
        problem.refuse(argument, axis, problem["D"], "32, 64 or 128")


def check_indexer_row(problem: Problem, cache: str, axis: str) -> None:
    """Rows of the cache are those of one format for keys of D dims."""
    if not indexer_layouts(problem[axis], problem["D"]):
        problem.refuse(cache, f"axis {axis} (axis 2)", problem[axis], indexer_rows(problem["D"]))


def check_indexer_pages(problem: Problem, cache: str = "cache") -> None:
    problem.require_pages(cache, 4)  # an entry's scales are one word


OP = Op(
    prototype=write_indexer_cache,
    tensors={
        "keys": Tensor("T D", FLOATS),
        "slots": Tensor("T", ("int32", "int64"), index_of="P R"),
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
