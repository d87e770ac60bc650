import numpy as np

from xmla.core.op import Case


def _case(
    requests: int, next_n: int, keys: int, page_size: int, with_ids: bool = False, with_lengths: bool = False,
    **attrs: object,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        width = 5
        indices = rng.integers(0, width * page_size, (requests * next_n, keys)).astype(np.int32)
        bad = rng.choice([-1, -(2**31), width * page_size, 2**31 - 1], indices.shape)
        indices = np.where(rng.random(indices.shape) < 0.2, bad, indices).astype(np.int32)
        indices[0] = -1
        table = rng.permutation(requests * width).reshape(requests, width).astype(np.int32)
        table[-1, 2] = -1
        table[0, 3] = 2**31 - 1
        inputs = {"indices": indices, "block_table": table}
        if with_ids:
            ids = rng.choice([*range(requests), -1, requests, 2**31 - 1], requests * next_n)
            inputs["request_ids"] = ids.astype(np.int32)
        if with_lengths:
            inputs["lengths"] = rng.integers(-3, width * page_size + 3, requests * next_n).astype(np.int32)
        return inputs

    name = f"b{requests}-next{next_n}-k{keys}-page{page_size}"
    name += "-ids" * with_ids + "-lengths" * with_lengths + "-compact" * bool(attrs)
    return Case(name, make, {"page_size": page_size, **attrs})


CASES = (
    _case(1, 1, 17, 64),
    _case(3, 2, 2048, 53),
    _case(2, 3, 2049, 2, with_ids=True),
    _case(4, 1, 1, 576),
    _case(2, 2, 2500, 61, compact=True),
    _case(3, 2, 33, 7, with_ids=True, with_lengths=True),
)
