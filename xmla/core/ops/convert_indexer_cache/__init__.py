from typing import Any

from xmla.core.checks import Limit
from xmla.core.layout import INDEXER_FORMATS
from xmla.core.op import BYTES, Op, Problem, Tensor
from xmla.core.ops.convert_indexer_cache.cases import CASES
from xmla.core.ops.convert_indexer_cache.plan import pairs_of, plan
from xmla.core.ops.convert_indexer_cache.reference import reference
from xmla.core.ops.write_indexer_cache import check_indexer_pages


def convert_indexer_cache(
    source, source_slots, slots, cache, *, source_format: str | None = None, cache_format: str | None = None
) -> Any:
    """Move indexer keys from one paged cache to another of either format with the same dims, in place.

        cache[slots[t]] = what write_indexer_cache stores of the float32 key that source[source_slots[t]] stands for

    Args:
        source: [SOURCE_P, SOURCE_R, SOURCE_ROW] in a format of `write_indexer_cache`; any page size, pages start on
            multiples of 4 bytes.
        source_slots: [T] int32 or int64, page · R + offset of `source`. Entries that no slot names are never read.
        slots: [T] int32 or int64, of `cache`. A token of which either slot is out of range is skipped. Valid
            slots must be distinct.
        cache: [P, R, ROW], updated in place, other memory than `source`; only the entries named by `slots` are touched.
        source_format, cache_format: "fp8" or "mxfp4". Needed where the rows of both caches leave the dims open.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; the rows hold other dims, or are those of
            several formats and none is given.

    Numerics: value times scale in float32, which is exact for scales that are powers of two, and rounded as by
    `write_indexer_cache`. −0 keeps its sign; NaN stays NaN.
    """


def check(problem: Problem) -> None:
    for name in ("source_format", "cache_format"):
        if problem.attrs[name] not in (None, *INDEXER_FORMATS):
            expected = " or ".join(map(repr, INDEXER_FORMATS))
            problem.refuse(name, "value", repr(problem.attrs[name]), expected)
    found = pairs_of(problem)
    source_row, row = problem["SOURCE_ROW"], problem["ROW"]
    if not found:
        expected = f"that of a format with the dims of source, whose rows have {source_row} bytes"
        problem.refuse("cache", "axis ROW (axis 2)", row, expected)
    if len(found) > 1:
        choices = " or ".join(f"{origin.format!r} (D {origin.dim})" for origin, _ in found)
        expected = f"{choices}: rows of {source_row} and {row} bytes are those of both"
        problem.refuse("source_format", "value", None, expected)
    check_indexer_pages(problem, "source")
    check_indexer_pages(problem)


OP = Op(
    prototype=convert_indexer_cache,
    tensors={
        "source": Tensor("SOURCE_P SOURCE_R SOURCE_ROW", BYTES),
        "source_slots": Tensor("T", ("int32", "int64"), index_of="SOURCE_P SOURCE_R"),
        "slots": Tensor("T", ("int32", "int64"), index_of="P R"),
        "cache": Tensor("P R ROW", BYTES),
    },
    outputs={},
    mutates=("cache",),
    check=check,
    limits=lambda p, arrays: (
        Limit("source_slots", -1, p["SOURCE_P"] * p["SOURCE_R"] - 1),
        Limit("slots", -1, p["P"] * p["R"] - 1),
    ),
    plan=plan,
    reference=reference,
    cases=CASES,
)
