from typing import Any

from xmla.core.checks import Limit
from xmla.core.layout import SCALE_FLOORS, mla_layout
from xmla.core.op import BYTES, HALVES, Op, Problem, Tensor
from xmla.core.ops.convert_mla_cache.cases import CASES
from xmla.core.ops.convert_mla_cache.plan import plan
from xmla.core.ops.convert_mla_cache.reference import reference


def convert_mla_cache(
    source, source_slots, slots, cache, *, source_format: str | None = None, cache_format: str | None = None,
    scale_floor: str = "scale",
) -> Any:  # fmt: skip
    """Move entries from one paged latent cache to another of any format with the same dims, in place.

        cache[slots[t]] = what write_mla_cache stores of the float32 entry that source[source_slots[t]] stands for

    Args:
        source: [SOURCE_P, SOURCE_R, SOURCE_ROW] in any format of `write_mla_cache`; any page size, any page stride.
        source_slots: [T] int32 or int64, page · R + offset of `source`. Entries that no slot names are never read.
        slots: [T] int32 or int64, of `cache`. A token of which either slot is out of range is skipped. Valid
            slots must be distinct.
        cache: [P, R, ROW], updated in place, other memory than `source`; only the entries named by `slots` are touched.
        source_format, cache_format, scale_floor: As in `write_mla_cache`.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; the formats hold other dims; 528 or 288
            bytes and no format named.

    Numerics: an entry is read exactly and rounded once, as by `write_mla_cache`.
    """


def check(problem: Problem) -> None:
    source, layout = mla_layout(problem, "source"), mla_layout(problem)
    if (source.dims, source.tail) != (layout.dims, layout.tail):
        problem.refuse("cache", "format", repr(layout.name), f"one with the dims of {source.name!r}")
    if problem.attrs["scale_floor"] not in SCALE_FLOORS:
        problem.refuse("scale_floor", "value", repr(problem.attrs["scale_floor"]), "'scale' or 'amax'")


OP = Op(
    prototype=convert_mla_cache,
    tensors={
        "source": Tensor("SOURCE_P SOURCE_R SOURCE_ROW", (*BYTES, *HALVES)),
        "source_slots": Tensor("T", ("int32", "int64"), index_of="SOURCE_P SOURCE_R"),
        "slots": Tensor("T", ("int32", "int64"), index_of="P R"),
        "cache": Tensor("P R ROW", (*BYTES, *HALVES)),
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
