from typing import Any

from xmla.core.call import BYTES, HALVES, Problem, Result, Tensor, entries_once, mla_format
from xmla.core.op import Op
from xmla.core.ops.cache.read_mla_cache.cases import CASES
from xmla.core.ops.cache.read_mla_cache.plan import plan
from xmla.core.ops.cache.read_mla_cache.reference import reference
from xmla.core.plan import Implementation


def read_mla_cache(cache, slots, *, cache_format: str | None = None, dtype: str = "bfloat16") -> Any:
    """Gather entries of the paged latent cache and dequantise them.

        rows[t] = (values · scale of their tile) ∥ rope,     of the entry at slots[t]

    Args:
        cache: [P, R, ROW] in any format of `write_mla_cache`; any page size, any page stride. Scales may be any that
            the format can hold, not only powers of two.
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) gives a row of zeros. Entries that no slot
            names are never read. `map_slots` computes slots from a block table.
        cache_format: As in `write_mla_cache`. Default: inferred from ROW and dtype.
        dtype: Of the result: "bfloat16" or "float32".

    Returns:
        rows: [T, L+E] in `dtype`: 576 or 512 dims.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; ROW is 528, 368 or 288 bytes and no
            `cache_format` is given.

    Numerics: the float32 product is rounded once to `dtype`; with power-of-two or e4m3 scales bfloat16 is exact too.

    Example:
        >>> cache, slots = xp.ones((2, 4, 576), dtype=xp.bfloat16), xp.asarray([3, -1], dtype=xp.int32)
        >>> ops.read_mla_cache(cache, slots)[:, 0].tolist()
        [1.0, 0.0]
    """


def check(problem: Problem) -> None:
    if problem.attrs.dtype not in ("bfloat16", "float32"):
        problem.refuse("dtype", "value", repr(problem.attrs.dtype), "'bfloat16' or 'float32'")


OP = Op(
    prototype=read_mla_cache,
    tensors={
        "cache": Tensor("P R ROW", (*BYTES, *HALVES), format=mla_format, format_attribute="cache_format"),
        "slots": Tensor("T", ("int32", "int64"), index_of="P R"),
    },
    outputs={
        "rows": Result("T L+E", lambda p: p.attrs.dtype, sizes={"L+E": lambda p: p.formats["cache"].dims}),
    },
    check=check,
    work=entries_once,
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
