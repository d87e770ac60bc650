from typing import Any

from xmla.core.call import BYTES, INDEXER_ALIGNMENT, Problem, Tensor, check_indexer_format_name, entries_once
from xmla.core.formats.indexer import IndexerLayout, indexer_pairs
from xmla.core.op import Op
from xmla.core.ops.cache.convert_indexer_cache.cases import CASES
from xmla.core.ops.cache.convert_indexer_cache.plan import plan
from xmla.core.ops.cache.convert_indexer_cache.reference import reference
from xmla.core.plan import Implementation


def convert_indexer_cache(
    source, source_slots, slots, cache, *, source_format: str | None = None, cache_format: str | None = None
) -> Any:
    """Copy indexer keys from one paged cache to another of any format with the same dims, in place.

        cache[slots[t]] = what write_indexer_cache stores of the float32 key that source[source_slots[t]] stands for

    Args:
        source: [SOURCE_P, SOURCE_R, SOURCE_ROW] in a format of `write_indexer_cache`; any page size, pages start on
            multiples of 4 bytes.
        source_slots: [T] int32 or int64, slots of `source`: page · SOURCE_R + offset. Entries that no slot names are
            never read.
        slots: [T] int32 or int64, slots of `cache`: page · R + offset. A token is skipped if either of its slots is
            out of range. Valid slots must be distinct.
        cache: [P, R, ROW], updated in place, in other memory than `source`; only the entries named by `slots` are
            touched.
        source_format, cache_format: "fp8" or "mxfp4", needed if SOURCE_ROW and ROW do not determine the dims; or
            "fp8_ue8m0".

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; the caches hold different dims; the rows fit
            several formats and none is given.

    Numerics: value · scale in float32, exact for power-of-two scales, rounded as in `write_indexer_cache`. −0 keeps its
    sign; NaN stays NaN.

    Example:
        >>> source, slots = xp.zeros((2, 4, 132), dtype=xp.uint8), xp.asarray([0], dtype=xp.int32)
        >>> cache = xp.zeros((2, 4, 68), dtype=xp.uint8)
        >>> cache = ops.convert_indexer_cache(source, slots, slots, cache)
        >>> cache.reshape(2, -1)[0, 256:260].tolist()  # the entry's scales in the footer: 2**-126
        [1, 1, 1, 1]
    """


def formats_of(problem: Problem) -> tuple[IndexerLayout, IndexerLayout]:
    """The formats of source and cache: the pair of equal dims that fits both rows and the names given."""
    for name in ("source_format", "cache_format"):
        check_indexer_format_name(problem, name)
    source_row, row = problem["SOURCE_ROW"], problem["ROW"]
    found = indexer_pairs(source_row, row, problem.attrs.source_format, problem.attrs.cache_format)
    if not found:
        expected = f"that of a format with the dims of source, whose rows have {source_row} bytes"
        problem.refuse("cache", "axis ROW (axis 2)", row, expected)
    if len(found) > 1:
        choices = " or ".join(f"{origin.format!r} (D {origin.dim})" for origin, _ in found)
        expected = f"{choices}: rows of {source_row} and {row} bytes are those of both"
        problem.refuse("source_format", "value", None, expected)
    return found[0]


def pair_format(problem: Problem, cache: str) -> IndexerLayout:
    source, layout = formats_of(problem)
    problem.require_pages(cache, INDEXER_ALIGNMENT)
    return source if cache == "source" else layout


OP = Op(
    prototype=convert_indexer_cache,
    tensors={
        "source": Tensor("SOURCE_P SOURCE_R SOURCE_ROW", BYTES, format=pair_format, format_attribute="source_format"),
        "source_slots": Tensor("T", ("int32", "int64"), index_of="SOURCE_P SOURCE_R"),
        "slots": Tensor("T", ("int32", "int64"), index_of="P R", distinct=True),
        "cache": Tensor("P R ROW", BYTES, format=pair_format, format_attribute="cache_format"),
    },
    outputs={},
    updates={"cache": None},
    work=entries_once,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
    instead="xmla.layouts.convert",
)
