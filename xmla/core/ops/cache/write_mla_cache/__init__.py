from typing import Any

from xmla.core.call import BYTES, FLOATS, HALVES, Problem, Tensor, check_scale_floor, entries_once, mla_format
from xmla.core.op import Op
from xmla.core.ops.cache.write_mla_cache.cases import CASES
from xmla.core.ops.cache.write_mla_cache.plan import plan
from xmla.core.ops.cache.write_mla_cache.reference import reference
from xmla.core.plan import Implementation


def write_mla_cache(latent, rope, slots, cache, *, cache_format: str | None = None, scale_floor: str = "scale") -> Any:
    """Quantise entries and insert them into a paged latent cache, in place.

        scale[g]    = 2 ** max(ceil(log2(max|x[g]| / greatest)), floor)         g: each tile of dims that shares a scale
        cache[slot] = values(x / scale) with scales and roped dims where the format has them

    Args:
        latent: [T, L] bfloat16, float16 or float32: the dims before the roped ones. 512 (V3.2: the latent after its
            RMSNorm), 448 in V4's formats.
        rope: [T, E], any of the same dtypes: the roped dims, 64; 0 in "nope" and "nvfp4_nope".
        slots: [T] int32 or int64, page · R + offset. A slot outside [0, P·R) is skipped: its token is not written.
            Valid slots must be distinct.
        cache: [P, R, ROW], any page size R, any address and page stride that keep elements aligned. Updated in place;
            only the entries named by `slots` are touched.
        cache_format: The byte layout of entries (`xmla.core.formats.mla`). Default: inferred from ROW and dtype.
            Packed formats (uint8, int8 or float8_e4m3fn); the greatest value is 448 in e4m3 and 6 in e2m1:
            "v32" 656 B: e4m3, one float32 scale per 128 dims, bfloat16 rope.   "nope" 528 B: the same without rope.
            "v4" 584 B: e4m3, one UE8M0 scale per 64 dims, bfloat16 rope; scales in the page's footer.
            "v41" 528 B: 512 e4m3, roped dims included, then the entry's 16 UE8M0 scales, one per 32 dims.
            "v41_fp4" 288 B: 512 e2m1, roped dims included, then the entry's 32 e4m3 scales, one per 16 dims: V4.1's
            compressed cache.
            "v41_footer", "v41_fp4_footer": the same two before V4.1's release, with scales in the page's footer.
            "nvfp4" 352 B: e2m1, one e4m3 scale per 16 dims, e4m3 rope.   "nvfp4_bf16" 432 B: the same, bfloat16 rope.
            "nvfp4_fp8" 368 B: the same, e4m3 rope with a float32 scale, max|rope| / 448.
            "nvfp4_scaled" 368 B: the same, latent dims are first divided by a float32, max|latent| / 2688.
            "nvfp4_nope" 304 B: as "nvfp4_scaled", without rope.
            "v4_nvfp4" 384 B: V4's dims, e2m1, one e4m3 scale per 16 dims in the page's footer, bfloat16 rope.
            "v4_mxfp4" 368 B: V4's dims, e2m1, one UE8M0 scale per 32 dims behind them, bfloat16 rope.
            Plain rows of bfloat16 or float16: "plain" 576, "plain_v4" 512 elements.
        scale_floor: "scale": no scale is below 2**-13 (FlashMLA's writer). "amax": no scale is below the scale of a
            tile whose largest magnitude is 1e-4 (vLLM's writer). e4m3 scales have one floor, 2**-9.

    e4m3 scales are max|x[g]| / 6, at most 448, rounded to e4m3: up in "nvfp4", so that no
    value is larger than 6 scales, elsewhere to nearest (FlashMLA, vLLM, FlashInfer).

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; ROW is 528, 368 or 288 bytes and no
            `cache_format` is given.

    Rounding: to nearest even, saturating. NaN stays NaN; e2m1 has no NaN, so there it makes its tile's scale NaN.
    "v32", "v4", "v41" and "v41_fp4" have the bytes that FlashMLA's writers store (README of FlashMLA, KV cache format;
    tests/quant.py; V4.1 as of 2026-09-30), except in a tile that holds a NaN or an infinity.

    Example:
        >>> latent, rope, slots = xp.ones((1, 512)), xp.zeros((1, 64)), xp.asarray([5], dtype=xp.int32)
        >>> cache = xp.zeros((2, 4, 656), dtype=xp.uint8)
        >>> cache = ops.write_mla_cache(latent, rope, slots, cache)
        >>> ops.read_mla_cache(cache, slots)[0, :2].tolist()
        [1.0, 1.0]
    """


def check(problem: Problem) -> None:
    layout = problem.formats["cache"]
    for argument, axis, size in (("latent", "L", layout.latent), ("rope", "E", layout.rope)):
        if problem[axis] != size:
            problem.refuse(argument, f"axis {axis} (axis 1)", problem[axis], f"{size} in {layout.name!r}")
    check_scale_floor(problem)


OP = Op(
    prototype=write_mla_cache,
    tensors={
        "latent": Tensor("T L", FLOATS),
        "rope": Tensor("T E", FLOATS),
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
