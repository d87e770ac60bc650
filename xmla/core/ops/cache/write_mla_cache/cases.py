import ml_dtypes
import numpy as np

from xmla.core.formats.mla import (
    NOPE,
    NVFP4,
    NVFP4_BF16,
    NVFP4_FP8,
    NVFP4_NOPE,
    NVFP4_SCALED,
    PLAIN,
    PLAIN_V4,
    V4,
    V4_MXFP4,
    V4_NVFP4,
    V32,
    V41,
    V41_FOOTER,
    V41_FP4,
    V41_FP4_FOOTER,
    MlaLayout,
)
from xmla.core.op import Case
from xmla.core.ops.cases import BF16, empty_pages, normal

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def _case(
    tokens: int, entries: int, layout: MlaLayout = V32, dtype: np.dtype = BF16, padding: int = 0,
    slots_dtype: type = np.int32, cache_dtype: np.dtype = BF16, **attrs: object,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        pages = -(-tokens // entries) + 2
        # Every magnitude from far below the scale's floor to large, one tile all zero, one with a NaN.
        tile = layout.tile
        magnitude = np.exp2(rng.uniform(-24, 12, (tokens, 512 // tile, 1))).astype(np.float32)
        latent = (rng.standard_normal((tokens, 512 // tile, tile), np.float32) * magnitude).reshape(tokens, 512)
        latent[0, :tile] = 0.0
        latent[-1, 200] = np.nan
        latent[-1, 300:302] = 448.0, -449.0
        slots = rng.permutation(pages * entries)[:tokens].astype(slots_dtype)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * entries, 2**31 - 1])
        whole = np.concatenate([latent.astype(dtype), normal(rng, tokens, 64, dtype=dtype)], axis=1)
        return {
            "latent": whole[:, : layout.latent],
            "rope": whole[:, 512 : 512 + layout.rope],
            "slots": slots,
            "cache": empty_pages(
                pages, entries, layout.row, np.dtype(np.uint8) if layout.packed else cache_dtype, padding
            ),
        }

    kind = f"{layout.name}-t{tokens}-page{entries}-{np.dtype(dtype).name}-pad{padding}"
    return Case("-".join([kind, *map(str, attrs.values())]), make, attrs)


CASES = (
    _case(1, 64),
    _case(7, 2, padding=656),
    _case(13, 53, dtype=F16, slots_dtype=np.int64),
    _case(5, 69, dtype=F32, padding=16),
    _case(9, 64, dtype=np.dtype(ml_dtypes.bfloat16), padding=656, scale_floor="amax"),
    _case(9, 64, V4, padding=64),
    _case(7, 61, V4, F32, padding=2, scale_floor="amax"),
    _case(11, 2, V41, cache_format="v41"),
    _case(9, 53, V41_FP4, F32, padding=5, cache_format="v41_fp4"),
    _case(7, 61, V41_FOOTER, padding=3, cache_format="v41_footer", scale_floor="amax"),
    _case(5, 2, V41_FP4_FOOTER, cache_format="v41_fp4_footer"),
    _case(6, 64, NOPE, F32, padding=4, cache_format="nope"),
    _case(9, 3, NVFP4, F32, padding=1),
    _case(9, 3, NVFP4_BF16, padding=6),
    _case(9, 5, NVFP4_FP8, F32, padding=4, cache_format="nvfp4_fp8"),
    _case(9, 61, NVFP4_SCALED, F32, cache_format="nvfp4_scaled"),
    _case(7, 64, NVFP4_NOPE, padding=8),
    _case(7, 5, V4_NVFP4, F32, padding=2),
    _case(7, 3, V4_MXFP4, F32, padding=2, cache_format="v4_mxfp4"),
    _case(5, 61, PLAIN, padding=8),
    _case(5, 64, PLAIN_V4, F32, cache_dtype=F16),
)
