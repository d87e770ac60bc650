from typing import Any

from xmla.core.checks import Limit
from xmla.core.layout import mla_layout
from xmla.core.op import BYTES, FLOATS, Op, Problem, Tensor
from xmla.core.ops.write_mla_cache.cases import CASES
from xmla.core.ops.write_mla_cache.plan import plan
from xmla.core.ops.write_mla_cache.reference import reference


def write_mla_cache(latent, rope, slots, cache) -> Any:
    """Quantise compressed latents and insert them into the paged cache, in place.

        scale[g]            = 2 ** max(ceil(log2(max|latent[g]| / 448)), -13)      g: the 4 tiles of 128 latent dims
        cache[slot] bytes   = e4m3(latent / scale) ∥ float32 scales ∥ bfloat16 rope

    Args:
        latent: [T, L] bfloat16, float16 or float32, L = 512. The latent after its RMSNorm.
        rope: [T, E], any of the same dtypes, E = 64. The roped key part; stored unquantised as bfloat16.
        slots: [T] int32 or int64. page · R + offset. A slot outside [0, P·R) is skipped: its token is not written.
            Valid slots must be distinct.
        cache: [P, R, 656] uint8, int8 or float8_e4m3fn; any page size R, any page stride. Updated in place; only
            the rows named by `slots` are touched.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong.

    Rounding: to nearest even, saturating at ±448 · scale; NaN stays NaN. Scales are powers of two with a positive
    floor, byte for byte what FlashMLA's writer stores (README of FlashMLA, FP8 KV cache; tests/quant.py).
    """


def check(problem: Problem) -> None:
    layout = mla_layout(problem.specs["cache"])
    if layout is None:
        problem.refuse("cache", "axis ROW (axis 2)", problem["ROW"], "656 bytes (V3.2)")
    for argument, axis, size in (("latent", "L", layout.latent), ("rope", "E", layout.rope)):
        if problem[axis] != size:
            problem.refuse(argument, f"axis {axis} (axis 1)", problem[axis], size)
    problem.require_dense_entries("cache")


OP = Op(
    prototype=write_mla_cache,
    tensors={
        "latent": Tensor("T L", FLOATS),
        "rope": Tensor("T E", FLOATS),
        "slots": Tensor("T", ("int32", "int64")),
        "cache": Tensor("P R ROW", BYTES),
    },
    outputs={},
    mutates=("cache",),
    check=check,
    limits=lambda p, arrays: (Limit("slots", -1, p["P"] * p["R"] - 1),),
    plan=plan,
    reference=reference,
    cases=CASES,
)
