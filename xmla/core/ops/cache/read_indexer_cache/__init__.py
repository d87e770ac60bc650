from typing import Any

from xmla.core.call import BYTES, INDEXER_ALIGNMENT, Problem, Result, Tensor, check_indexer_format_name, entries_once
from xmla.core.formats.indexer import IndexerLayout, indexer_layouts, indexer_rows
from xmla.core.op import Op
from xmla.core.ops.cache.read_indexer_cache.cases import CASES
from xmla.core.ops.cache.read_indexer_cache.plan import plan
from xmla.core.ops.cache.read_indexer_cache.reference import reference
from xmla.core.plan import Implementation


def read_indexer_cache(cache, slots, *, cache_format: str | None = None) -> Any:
    """Gather indexer keys from the paged cache, still quantised, as `indexer_logits` takes them.

        fp8:    key = keys · key_scales, or · 2 ** (each byte of key_scales − 127) (fp8_ue8m0)
        mxfp4:  key = e2m1(keys) · 2 ** (byte d/32 of key_scales − 127) for dim d

    Args:
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn, scales in the page's footer (`write_indexer_cache`). ROW is D+4
            (fp8) or D/2+4 (mxfp4), D = 32, 64 or 128. Any page size, pages start on multiples of 4 bytes.
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) gives a key and scales of zero bytes.
            Entries that no slot names are never read.
        cache_format: "fp8" or "mxfp4", needed if ROW is 36 or 68, which both formats have; or "fp8_ue8m0".

    Returns:
        keys: [T, D] float8_e4m3fn, or [T, D/2] uint8, two dims per byte, the even one in the low nibble.
        key_scales: [T] float32, or [T] int32, one UE8M0 byte per block of 32 dims, the first block in the lowest byte:
            one word per row, as DeepGEMM takes them. fp8_ue8m0: [T] int32, the scale's UE8M0 byte four times.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; both formats have rows of ROW bytes and none is given.

    Example:
        >>> cache, slots = xp.zeros((2, 4, 132), dtype=xp.uint8), xp.asarray([5, 0], dtype=xp.int32)
        >>> keys, key_scales = ops.read_indexer_cache(cache, slots)
        >>> tuple(keys.shape), key_scales.tolist()
        ((2, 128), [0.0, 0.0])
    """


def row_format(problem: Problem, cache: str) -> IndexerLayout:
    """The format with rows of ROW bytes; if two have them, the one named by `cache_format`."""
    check_indexer_format_name(problem, "cache_format")
    row, name = problem["ROW"], problem.attrs.cache_format
    found = indexer_layouts(row, form=name)
    if not found:
        problem.refuse(cache, "axis ROW (axis 2)", row, indexer_rows(form=name))
    if len(found) > 1:
        choices = " or ".join(f"{layout.format!r} (D {layout.dim})" for layout in found)
        problem.refuse("cache_format", "value", None, f"{choices}: rows of {row} bytes are those of both")
    problem.require_pages(cache, INDEXER_ALIGNMENT)
    return found[0]


OP = Op(
    prototype=read_indexer_cache,
    tensors={
        "cache": Tensor("P R ROW", BYTES, format=row_format, format_attribute="cache_format"),
        "slots": Tensor("T", ("int32", "int64"), index_of="P R"),
    },
    outputs={
        "keys": Result(
            "T VALUES",
            lambda p: p.formats["cache"].dtypes[0],
            sizes={"VALUES": lambda p: p.formats["cache"].value_bytes},
        ),
        "key_scales": Result("T", lambda p: p.formats["cache"].dtypes[1]),
    },
    work=entries_once,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
