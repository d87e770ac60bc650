import numpy as np

from xmla.core.op import Case


def _case(
    requests: int, next_n: int, width: int, page_size: int, window: int, ratio: int = 1, with_ids: bool = False
) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        capacity = width * page_size * ratio
        lengths = rng.integers(0, capacity + 1, requests * next_n).astype(np.int32)
        lengths[0] = min(window * ratio, capacity)  # exactly a window
        if len(lengths) > 3:
            lengths[1:4] = 0, -5, capacity + 77  # the last is clamped
        table = rng.permutation(requests * width).reshape(requests, width).astype(np.int32)
        if requests > 1:
            table[-1, width // 2] = -1
            table[0, -1] = 2**31 - 1
        inputs = {"block_table": table, "lengths": lengths}
        if with_ids:
            ids = rng.choice([*range(requests), -1, requests, 2**31 - 1], requests * next_n)
            inputs["request_ids"] = ids.astype(np.int32)
        return inputs

    name = f"b{requests}-next{next_n}-window{window}-page{page_size}-ratio{ratio}{'-ids' if with_ids else ''}"
    return Case(name, make, {"window": window, "page_size": page_size, "ratio": ratio})


CASES = (
    _case(1, 1, 5, 64, 128),
    _case(3, 2, 9, 53, 128, with_ids=True),
    _case(2, 3, 70, 2, 140, ratio=128),
    _case(4, 1, 3, 64, 1100, ratio=4),
    _case(5, 1, 4, 7, 1),
)
