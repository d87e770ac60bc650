import numpy as np

from xmla.core.op import Case


def _case(
    requests: int, next_n: int, keys: int, places: int, num_entries: int, empty: float = 0.3, padding: int = 0
) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        def rows(width: int, missing: float) -> np.ndarray:
            """Some entries of each request, each once, in any order, −1 between them."""
            chosen = np.stack([rng.permutation(max(num_entries, width))[:width] for _ in range(requests)])
            return np.where((rng.random(chosen.shape) < missing) | (chosen >= num_entries), -1, chosen)

        held = np.full((requests, places + padding), -1, np.int32)
        held[:, :places] = rows(places, empty)
        slots = rng.permutation(requests * places + 7)[: requests * places].reshape(requests, places).astype(np.int32)
        # What the first token selects, others select too; some columns name nothing, or no entry.
        again = rows(keys, 0.1)
        indices = np.where(rng.random((next_n, requests, keys)) < 0.6, again, [rows(keys, 0.1) for _ in range(next_n)])
        indices = indices.swapaxes(0, 1).reshape(requests * next_n, keys)
        wrong = rng.choice([-(2**31), num_entries, 2**31 - 1], indices.shape)
        indices = np.where(rng.random(indices.shape) < 0.05, wrong, indices).astype(np.int32)
        return {"indices": indices, "held": held[:, :places], "slots": slots}

    name = f"b{requests}-next{next_n}-k{keys}-places{places}-of{num_entries}" + "-empty" * (empty == 1)
    return Case(name, make, {"num_entries": num_entries})


CASES = (
    _case(2, 1, 8, 16, 40),
    _case(3, 2, 17, 181, 500, padding=3),
    _case(1, 1, 32, 32, 65, empty=0),
    _case(4, 1, 5, 61, 300, empty=1),
    _case(2, 3, 400, 1300, 3000),
    _case(4, 1, 8, 16, 40),
)
