import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import BF16, normal


def _case(
    tokens: int, heads: int, dim: int = 128, dtype: np.dtype = BF16, scale: float | None = None, layout: str = "fp8"
) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        q = normal(rng, heads, tokens, dim, dtype=dtype, scale=3.0).transpose(1, 0, 2)  # heads outermost in memory
        q[0, 0] = 0.0
        return {"q": q, "weights": normal(rng, tokens, heads, dtype=np.dtype(np.float32))}

    return Case(f"{layout}-t{tokens}-i{heads}-d{dim}-{np.dtype(dtype).name}", make, {"scale": scale, "format": layout})


CASES = (
    _case(1, 64),
    _case(3, 7, dim=64, dtype=np.dtype(np.float16), scale=0.5),
    _case(5, 32, dim=32, dtype=np.dtype(np.float32)),
    _case(3, 64, layout="mxfp4"),
    _case(5, 7, dim=32, dtype=np.dtype(np.float32), scale=0.5, layout="mxfp4"),
)
