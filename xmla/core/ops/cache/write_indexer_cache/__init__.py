from typing import Any

from xmla.core.call import BYTES, FLOATS, Tensor, entries_once, indexer_format
from xmla.core.op import Op
from xmla.core.ops.cache.write_indexer_cache.cases import CASES
from xmla.core.ops.cache.write_indexer_cache.plan import plan
from xmla.core.ops.cache.write_indexer_cache.reference import reference
from xmla.core.plan import Implementation


def write_indexer_cache(keys, slots, cache, *, cache_format: str | None = None) -> Any:
    """Quantise indexer keys and insert them into the paged indexer cache, in place.

        fp8, fp8_ue8m0:  scale = 2 ** max(ceil(log2(max|key| / 448)), -22);     values = e4m3(key / scale)
        mxfp4:           scale = 2 ** max(ceil(log2(max|block| / 6)), -126);    values = e2m1(block / scale)

    Args:
        keys: [T, D] bfloat16, float16 or float32, D = 32, 64 or 128. Normalised, roped, and rotated by a
            Hadamard transform where the queries are.
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) is skipped. Valid slots must be distinct.
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn; ROW is D+4 (fp8) or D/2+4 (mxfp4). Any page size, pages start
            on multiples of 4 bytes. A page holds the values of all R entries and then 4 bytes of scales per entry:
            ROW is the number of bytes per entry, not a stride. fp8: a float32. mxfp4: two dims per byte, the even one
            in the low nibble. One UE8M0 scale byte per block of 32 dims, and 127 in the bytes that D leaves unused.
        cache_format: Default: "fp8" or "mxfp4", which D and ROW imply. "fp8_ue8m0", with D = 128: the scale is four
            equal UE8M0 bytes in the place of the float32, as vLLM has them on Blackwell; where they differ a reader
            takes the key for NaN.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    The formats are those of DeepGEMM, vLLM and SGLang. Scale rules: fp8 as DeepSeek-V3.2-Exp's act_quant (amax floored
    at 1e-4, scale rounded up to a power of two); mxfp4 as vLLM's fp4 writer (amax floored at 6 · 2**-126). Rounding: to
    nearest, ties to even, saturating; −0 keeps its sign. NaN stays NaN. mxfp4 has no NaN: a block that contains one
    gets the scale byte 255, which makes the whole block NaN.

    Example:
        >>> keys, slots = xp.ones((1, 32)), xp.asarray([5], dtype=xp.int32)
        >>> cache = xp.zeros((2, 4, 36), dtype=xp.uint8)
        >>> cache = ops.write_indexer_cache(keys, slots, cache)
        >>> ops.read_indexer_cache(cache, slots, cache_format="fp8")[1].tolist()
        [0.00390625]
    """


OP = Op(
    prototype=write_indexer_cache,
    tensors={
        "keys": Tensor("T D", FLOATS),
        "slots": Tensor("T", ("int32", "int64"), index_of="P R", distinct=True),
        "cache": Tensor("P R ROW", BYTES, format=indexer_format, format_attribute="cache_format"),
    },
    outputs={},
    updates={"cache": None},
    work=entries_once,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
