import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import BF16, normal

F32 = np.dtype(np.float32)


def _case(
    parts: int, tokens: int, heads: int, latent: int = 512, dtype: np.dtype = BF16, with_sink: bool = False,
    strided: bool = False, **attrs: object,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        outs = normal(rng, parts, heads, tokens, latent, dtype=dtype) if strided else None
        outs = normal(rng, parts, tokens, heads, latent, dtype=dtype) if outs is None else outs.transpose(0, 2, 1, 3)
        lses = normal(rng, parts, tokens, heads, dtype=F32, scale=4.0)
        empty = rng.random(lses.shape) < 0.3
        empty[:, -1] |= tokens > 1  # a row without keys
        lses[empty] = rng.choice([-np.inf, np.inf], int(empty.sum()))
        outs[empty] = np.nan  # never read
        inputs = {"outs": outs, "lses": lses}
        if with_sink:
            inputs["sink"] = normal(rng, heads, dtype=F32, scale=3.0)
            inputs["sink"][:2] = np.inf, -np.inf
        return inputs

    name = f"w{parts}-t{tokens}-h{heads}-l{latent}-{np.dtype(dtype).name}{'-sink' if with_sink else ''}"
    return Case(name, make, attrs)


CASES = (
    _case(4, 3, 16),
    _case(2, 5, 7, with_sink=True, strided=True),
    _case(1, 2, 128, empty_lse="+inf"),
    _case(9, 3, 5, latent=96, dtype=F32, with_sink=True),
    _case(3, 2, 6, latent=512, dtype=np.dtype(np.float16)),
)
