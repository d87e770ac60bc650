import ml_dtypes
import numpy as np

from xmla.core.cases import BF16, empty_pages, normal
from xmla.core.layout import V32
from xmla.core.op import Case


def _case(tokens: int, entries: int, dtype: np.dtype = BF16, padding: int = 0, slots_dtype: type = np.int32) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        pages = -(-tokens // entries) + 2
        # Every magnitude from far below the scale's floor to large, one tile all zero, one with a NaN.
        magnitude = np.exp2(rng.uniform(-24, 12, (tokens, 4, 1))).astype(np.float32)
        latent = (rng.standard_normal((tokens, 4, 128), np.float32) * magnitude).reshape(tokens, 512)
        latent[0, :128] = 0.0
        latent[-1, 200] = np.nan
        latent[-1, 300:302] = 448.0, -449.0
        slots = rng.permutation(pages * entries)[:tokens].astype(slots_dtype)
        slots[tokens // 2] = rng.choice([-1, -(2**31), pages * entries, 2**31 - 1])
        return {
            "latent": latent.astype(dtype),
            "rope": normal(rng, tokens, 64, dtype=dtype),
            "slots": slots,
            "cache": empty_pages(pages, entries, V32.row, np.dtype(np.uint8), padding),
        }

    return Case(f"t{tokens}-page{entries}-{np.dtype(dtype).name}-pad{padding}", make)


CASES = (
    _case(1, 64),
    _case(7, 2, padding=656),
    _case(13, 53, dtype=np.dtype(np.float16), slots_dtype=np.int64),
    _case(5, 69, dtype=np.dtype(np.float32), padding=16),
    _case(9, 64, dtype=np.dtype(ml_dtypes.bfloat16), padding=656),
)
