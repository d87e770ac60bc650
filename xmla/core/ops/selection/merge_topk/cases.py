import numpy as np

from xmla.core.op import Case


def _case(parts: int, rows: int, candidates: int, k: int, values: str = "normal", packed: bool = False) -> Case:
    """`packed`: values and indices are slices of one array [W, 2, T, N], as one collective delivers them."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        shape = (parts, rows, candidates)
        value = rng.standard_normal(shape, np.float32)
        if values == "ties":
            value = np.round(value).astype(np.float32) * np.float32(0.5)
        elif values == "special":
            special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45], np.float32)
            value = np.where(rng.random(shape) < 0.6, rng.choice(special, shape), value).astype(np.float32)
        total = 3 * parts * candidates
        index = np.stack([rng.permutation(total)[: parts * candidates] for _ in range(rows)]).astype(np.int32)
        index = np.ascontiguousarray(index.reshape(rows, parts, candidates).transpose(1, 0, 2))
        index[0, 0, 0] = 2**31 - 1
        padding = rng.random(shape) < 0.2
        padding[:, -1] |= rows > 1  # a row without candidates
        if rows > 2:
            padding[:, 1] = True  # and one with fewer than k
            padding[-1, 1, : min(k, candidates) - 1] = False
        index[padding] = rng.choice([-1, -(2**31), -77], int(padding.sum()))
        value[padding] = rng.choice(np.array([np.nan, np.inf, 7.0], np.float32), int(padding.sum()))
        if not packed:
            return {"values": value, "indices": index}
        both = np.stack([value.view(np.int32), index], axis=1)
        return {"values": both[:, 0].view(np.float32), "indices": both[:, 1]}

    return Case(f"w{parts}-t{rows}-c{candidates}-k{k}-{values}", make, {"k": k})


CASES = (
    _case(4, 3, 32, 32),
    _case(3, 5, 100, 64, "ties", packed=True),
    _case(8, 4, 65, 70, "special"),
    _case(1, 2, 9, 20),
    _case(2, 2, 4200, 16, "ties"),  # more than one program holds
    _case(2, 1, 700, 4100),  # more than one program sorts
)
