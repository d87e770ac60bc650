from typing import Any

from xmla.core.checks import Limit
from xmla.core.layout import V32, mla_layout
from xmla.core.op import BYTES, Op, Problem, Tensor
from xmla.core.ops.read_mla_cache.cases import CASES
from xmla.core.ops.read_mla_cache.plan import plan
from xmla.core.ops.read_mla_cache.reference import reference
from xmla.core.spec import Spec


def read_mla_cache(cache, slots, *, dtype: str = "bfloat16") -> Any:
    """Gather entries of the paged latent cache and dequantise them.

        rows[t] = (e4m3 latent · scale of its tile of 128) ∥ rope,     of the entry at slots[t]

    Args:
        cache: [P, R, 656] uint8, int8 or float8_e4m3fn; any page size, any page stride. Scales may be any float32.
        slots: [T] int32 or int64. A slot outside [0, P·R) gives a row of zeros. Rows no slot names are never read.
            `map_slots` makes slots from a block table.
        dtype: "bfloat16" or "float32", of the result.

    Returns:
        rows: [T, L+E] in `dtype`, L = 512, E = 64.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    Numerics: the float32 product is rounded once to `dtype`; with power-of-two scales bfloat16 is exact too.
    """


def check(problem: Problem) -> None:
    if mla_layout(problem.specs["cache"]) is None:
        problem.refuse("cache", "axis ROW (axis 2)", problem["ROW"], "656 bytes (V3.2)")
    if problem.attrs["dtype"] not in ("bfloat16", "float32"):
        problem.refuse("dtype", "value", repr(problem.attrs["dtype"]), "'bfloat16' or 'float32'")
    problem.require_dense_entries("cache")


OP = Op(
    prototype=read_mla_cache,
    tensors={"cache": Tensor("P R ROW", BYTES), "slots": Tensor("T", ("int32", "int64"))},
    outputs={"rows": lambda p: Spec((p["T"], V32.latent + V32.rope), p.attrs["dtype"])},
    check=check,
    limits=lambda p, arrays: (Limit("slots", -1, p["P"] * p["R"] - 1),),
    plan=plan,
    reference=reference,
    cases=CASES,
)
