import numpy as np

from xmla.core.op import Case


def _case(
    rows: int, columns: int, k: int, granularity: int, values: str = "normal", with_starts: bool = False,
    newest: int = 1,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        logits = rng.standard_normal((rows, columns), np.float32)
        if values == "ties":
            logits = np.round(logits).astype(np.float32) * np.float32(0.5)
        elif values == "special":
            special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 3.4028235e38], np.float32)
            logits = np.where(rng.random(logits.shape) < 0.6, rng.choice(special, logits.shape), logits)
            block = np.arange(columns) // granularity
            logits[:, block % 3 == 1] = np.nan  # blocks of nothing else
            logits[:, block % 3 == 2] = np.where(rng.random((rows, 1)) < 0.5, -np.inf, logits[:, block % 3 == 2])
        ends = np.full(rows, columns, np.int32)
        ends[1:] = rng.integers(0, columns + 1, rows - 1)
        inputs = {"logits": logits.astype(np.float32), "ends": ends}
        if with_starts:
            inputs["starts"] = rng.integers(-3, columns // 2, rows).astype(np.int32)
        starts = inputs.get("starts", np.zeros(rows, np.int32))
        if rows > 3:
            ends[1] = k * granularity  # just not cut
            ends[2] = -5
            ends[3] = columns + 100  # clamped
        column = np.arange(columns)
        inputs["logits"][(column < starts[:, None]) | (column >= ends[:, None])] = np.nan  # never read
        return inputs

    name = f"t{rows}-n{columns}-k{k}-g{granularity}-newest{newest}-{values}{'-starts' if with_starts else ''}"
    return Case(name, make, {"k": k, "granularity": granularity, "newest": newest})


CASES = (
    _case(1, 1, 1, 8),
    _case(6, 4099, 65, 8, "ties", with_starts=True),
    _case(5, 2050, 20, 8, "special"),
    _case(4, 1203, 40, 4, "special", newest=0),
    _case(5, 3001, 9, 64, "ties", newest=3),
    _case(2, 2500, 7, 128, with_starts=True),
    _case(4, 700, 50, 1, newest=2),
    _case(1, 20001, 512, 8),  # several segments
)
