import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cache.compress_kv.cases import F16, F32, angles
from xmla.core.ops.cases import BF16, normal


def make_case(
    documents: tuple[tuple[int, int], ...], ratio: int, dim: int, series: int = 1, dtype: np.dtype = BF16,
    norm: bool = True, rope: int = 0, known: int | None = None, **attrs: object,
) -> Case:  # fmt: skip
    """Documents, each the position of its first token and a number of tokens; a first position of −1 is padding.

    `known`: positions that have angles, by default all.
    """

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        positions = np.concatenate([np.full(count, -1) if first < 0 else first + np.arange(count)
                                    for first, count in documents])  # fmt: skip
        inputs = {
            "kv": normal(rng, len(positions), series * dim, dtype=dtype),
            "score": normal(rng, len(positions), series * dim, dtype=dtype, scale=2.0),
            "ape": normal(rng, ratio, series * dim, dtype=F32),
            "positions": positions.astype(np.int32),
        }
        if norm:
            inputs["norm_weight"] = normal(rng, dim, dtype=dtype, scale=0.3) + dtype.type(1)
        if rope:
            inputs["cos_sin"] = angles(known or int(positions.max()) + 1, rope)
        return inputs

    lengths = "+".join(str(count) for _, count in documents)
    kind = "-norm" * norm + (f"-rope{rope}" if rope else "") + ("" if dtype == BF16 else f"-{dtype.name}")
    return Case(f"{lengths}-ratio{ratio}-{series}x{dim}{kind}", make, attrs)


CASES = (
    make_case(((0, 9), (0, 3), (0, 17)), 4, 512, 2, rope=64),
    make_case(((0, 40), (5, 30)), 16, 512, rope=64, eps=1e-3),
    make_case(((0, 150),), 128, 512, dtype=F16, rope=64),
    make_case(((0, 5), (-1, 3), (7, 9), (2, 1), (3, 6)), 3, 128, 2, rope=32, known=9),
    make_case(((0, 11), (0, 2)), 2, 64, dtype=F32),
    make_case(((0, 9), (0, 6)), 4, 32, norm=False),
    make_case(((0, 3), (6, 2)), 1, 128, norm=False, rope=16),
)
