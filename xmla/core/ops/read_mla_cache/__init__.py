from typing import Any

from xmla.core.checks import Limit
from xmla.core.layout import mla_layout
from xmla.core.op import BYTES, HALVES, Op, Problem, Tensor
from xmla.core.ops.read_mla_cache.cases import CASES
from xmla.core.ops.read_mla_cache.plan import plan
from xmla.core.ops.read_mla_cache.reference import reference
from xmla.core.spec import Spec


def read_mla_cache(cache, slots, *, cache_format: str | None = None, dtype: str = "bfloat16") -> Any:
    """Gather entries of the paged latent cache and dequantise them.

        rows[t] = (values · scale of their tile) ∥ rope,     of the entry at slots[t]

    Args:
        cache: [P, R, ROW] in any format of `write_mla_cache`; any page size, any page stride. Scales may be any that
            the format can hold, not only powers of two.
        slots: [T] int32 or int64. A slot outside [0, P·R) gives a row of zeros. Rows no slot names are never read.
            `map_slots` makes slots from a block table.
        cache_format: As in `write_mla_cache`. Default: what ROW and dtype tell.
        dtype: "bfloat16" or "float32", of the result.

    Returns:
        rows: [T, L+E] in `dtype`: 576 or 512 dims.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; 528 or 288 bytes and no `cache_format`.

    Numerics: the float32 product is rounded once to `dtype`; with power-of-two or e4m3 scales bfloat16 is exact too.
    """


def check(problem: Problem) -> None:
    mla_layout(problem)
    if problem.attrs["dtype"] not in ("bfloat16", "float32"):
        problem.refuse("dtype", "value", repr(problem.attrs["dtype"]), "'bfloat16' or 'float32'")


OP = Op(
    prototype=read_mla_cache,
    tensors={"cache": Tensor("P R ROW", (*BYTES, *HALVES)), "slots": Tensor("T", ("int32", "int64"), index_of="P R")},
    outputs={"rows": lambda p: Spec((p["T"], mla_layout(p).dims), p.attrs["dtype"])},
    check=check,
    limits=lambda p, arrays: (Limit("slots", -1, p["P"] * p["R"] - 1),),
    plan=plan,
    reference=reference,
    cases=CASES,
)
