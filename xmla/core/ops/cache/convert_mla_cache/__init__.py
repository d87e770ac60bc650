from typing import Any

from xmla.core.call import BYTES, HALVES, Problem, Tensor, check_scale_floor, entries_once, mla_format
from xmla.core.op import Op
from xmla.core.ops.cache.convert_mla_cache.cases import CASES
from xmla.core.ops.cache.convert_mla_cache.plan import plan
from xmla.core.ops.cache.convert_mla_cache.reference import reference
from xmla.core.plan import Implementation


def convert_mla_cache(
    source, source_slots, slots, cache, *, source_format: str | None = None, cache_format: str | None = None,
    scale_floor: str = "scale",
) -> Any:  # fmt: skip
    """Copy entries from one paged latent cache to another of any format with the same dims, in place.

        cache[slots[t]] = what write_mla_cache stores of the float32 entry that source[source_slots[t]] stands for,
                          the bytes of that entry between caches of one format and dtype

    Args:
        source: [SOURCE_P, SOURCE_R, SOURCE_ROW] in any format of `write_mla_cache`; any page size, any page stride.
        source_slots: [T] int32 or int64, slots of `source`: page · SOURCE_R + offset. Entries that no slot names are
            never read.
        slots: [T] int32 or int64, slots of `cache`: page · R + offset. A token is skipped if either of its slots is
            out of range. Valid slots must be distinct.
        cache: [P, R, ROW], updated in place, in other memory than `source`; only the entries named by `slots` are
            touched.
        source_format, cache_format, scale_floor: As in `write_mla_cache`.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; the formats hold different dims; a row is 528,
            368 or 288 bytes and its format is not named.

    Numerics: an entry is read exactly and rounded once, as in `write_mla_cache`.

    Example:
        >>> source, slots = xp.ones((2, 4, 576), dtype=xp.bfloat16), xp.asarray([0, 5], dtype=xp.int32)
        >>> cache = xp.zeros((2, 4, 656), dtype=xp.uint8)
        >>> cache = ops.convert_mla_cache(source, slots, slots, cache)
        >>> ops.read_mla_cache(cache, slots)[:, 0].tolist()
        [1.0, 1.0]
    """


def check(problem: Problem) -> None:
    source, layout = problem.formats["source"], problem.formats["cache"]
    if (source.dims, source.tail) != (layout.dims, layout.tail):
        problem.refuse("cache", "format", repr(layout.name), f"one with the dims of {source.name!r}")
    check_scale_floor(problem)


OP = Op(
    prototype=convert_mla_cache,
    tensors={
        "source": Tensor(
            "SOURCE_P SOURCE_R SOURCE_ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="source_format"
        ),
        "source_slots": Tensor("T", ("int32", "int64"), index_of="SOURCE_P SOURCE_R"),
        "slots": Tensor("T", ("int32", "int64"), index_of="P R", distinct=True),
        "cache": Tensor("P R ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="cache_format"),
    },
    outputs={},
    updates={"cache": None},
    check=check,
    work=entries_once,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
