import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import BF16

F32 = np.dtype(np.float32)


def make_case(
    rows: int, columns: int, k: int, values: str = "normal", with_starts: bool = False, dtype: np.dtype = F32
) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        logits = rng.standard_normal((rows, columns), np.float32)
        if values == "ties":
            logits = np.round(logits).astype(np.float32) * np.float32(0.5)
            logits[logits == 0] *= rng.choice([-1, 1], int((logits == 0).sum()))  # both zeros
        elif values == "special":
            special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45], np.float32)
            logits = np.where(rng.random(logits.shape) < 0.6, rng.choice(special, logits.shape), logits)
        elif values == "steep":  # so heavy a tail that most of a row lies in a sliver of its range
            logits = np.sign(logits) * np.exp(4 * logits**2)
        elif values == "overflow":  # the k largest all in few lanes: the candidates do not fit
            logits[:, ::1024] += 1000.0
            logits[:, 1::2] -= 100.0
        elif values == "constant":
            logits[:] = 1.0
        elif values == "boundary":  # a half of them is equal, and the k-th among these
            logits[rng.random(logits.shape) < 0.5] = 2.0
        elif values == "NaN":  # but a few
            logits[rng.random(logits.shape) < 0.99] = np.nan
        elif values == "misleading":  # the elements that a sample of one in 8 sees are the largest, or the least
            block = np.arange(columns // 256)
            seen = ((block * 8 + block * 5 % 8) * 32)[:, None] + np.arange(32)
            logits[0, seen.ravel()] += 1000.0
            logits[1, seen.ravel()] -= 1000.0
        ends = np.full(rows, columns, np.int32)
        if values != "misleading":
            ends[1:] = rng.integers(0, columns + 1, rows - 1)
        inputs = {"logits": logits.astype(np.float32), "ends": ends}
        if with_starts:
            inputs["starts"] = rng.integers(-3, columns // 2, rows).astype(np.int32)
        starts = inputs.get("starts", np.zeros(rows, np.int32))
        if rows > 2:
            ends[1] = k  # just not cut
            ends[2] = -5
        if rows > 4:
            ends[3] = columns + 100  # clamped
            ends[4] = k + 1
        column = np.arange(columns)
        inputs["logits"][(column < starts[:, None]) | (column >= ends[:, None])] = np.nan  # never read
        inputs["logits"] = inputs["logits"].astype(dtype)
        return inputs

    kind = f"{values}{'-starts' if with_starts else ''}{'' if dtype == F32 else f'-{dtype.name}'}"
    return Case(f"t{rows}-n{columns}-k{k}-{kind}", make, {"k": k})


CASES = (
    make_case(1, 1, 1),
    make_case(6, 300, 32),
    make_case(6, 4099, 513, "ties", with_starts=True),
    make_case(5, 2050, 100, "special"),
    make_case(3, 9001, 700, "overflow"),
    make_case(2, 9001, 700, "steep"),
    make_case(3, 3000, 1500),  # the k-th is about 0, where values differ little and keys much
    make_case(2, 9001, 512, "misleading"),
    make_case(1, 20001, 512),  # several segments
    make_case(2, 20001, 512, "special"),  # and fewer candidates in some than in others
    make_case(5, 9001, 2600, "ties", with_starts=True),  # more candidates than registers hold beside their order keys
    make_case(1, 20001, 2600),  # and in several segments
    make_case(2, 17000, 12500),  # too many for candidates in registers
    make_case(3, 7, 2048, with_starts=True),
    make_case(2, 20001, 512, dtype=BF16),
    make_case(6, 4099, 513, "special", with_starts=True, dtype=BF16),
    make_case(2, 17000, 12500, dtype=BF16),
)
