import numpy as np

from xmla.core.cases import BF16, mla_pool, normal
from xmla.core.layout import PLAIN, V32
from xmla.core.op import Case

INVALID = (-(2**31), -123456, -1, 2**31 - 1)


def _case(
    tokens: int, heads: int, keys: int, entries: int, packed: bool = True, dtype: np.dtype = BF16,
    with_lengths: bool = False, with_sink: bool = False, padding: int = 0, **attrs: object,
) -> Case:  # fmt: skip
    layout = V32 if packed else PLAIN

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        pages = -(-2 * keys // entries) + 1
        total = pages * entries
        slots = np.stack([rng.permutation(total)[:keys] for _ in range(tokens)]).astype(np.int32)
        lengths = rng.integers(0, keys + 1, tokens).astype(np.int32)
        lengths[0] = keys + 5  # clamped
        if tokens > 2:
            lengths[1] = 0
            lengths[2] = -3
        # Only what is read holds keys; past a row's length stand slots of NaN entries and garbage.
        visible = lengths if with_lengths else np.full(tokens, keys)
        seen = np.arange(keys) < visible[:, None]
        used = slots[seen]
        bad = (rng.random(slots.shape) < 0.1) & ((np.arange(keys) % 7) > 0)
        slots = np.where(bad, rng.choice([*INVALID, total], slots.shape), slots).astype(np.int32)
        if tokens > 1:
            slots[-1] = rng.choice(INVALID, keys)  # nothing valid
        cache = mla_pool(rng, layout, pages, entries, used, padding)
        inputs = {
            "q": normal(rng, heads, tokens, 576, dtype=dtype).transpose(1, 0, 2),
            "cache": cache if packed else cache.astype(dtype) if dtype != BF16 else cache,
            "slots": slots,
        }
        if with_lengths:
            inputs["lengths"] = lengths
        if with_sink:
            inputs["sink"] = normal(rng, heads, dtype=np.dtype(np.float32), scale=3.0)
            inputs["sink"][:2] = np.inf, -np.inf
        return inputs

    kind = "fp8" if packed else np.dtype(dtype).name
    name = f"t{tokens}-h{heads}-k{keys}-page{entries}-{kind}{'-sink' if with_sink else ''}"
    return Case(name, make, {"softmax_scale": 0.0721688, **attrs})


CASES = (
    _case(1, 128, 130, 64),
    _case(4, 16, 70, 2, with_lengths=True, with_sink=True, padding=656),
    _case(3, 5, 257, 61, with_lengths=True, empty_lse="+inf"),
    _case(2, 40, 64, 576, with_sink=True, batch_invariant=True),
    _case(2, 64, 100, 1, packed=False, with_sink=True),
    _case(5, 8, 600, 69, packed=False, with_lengths=True, padding=8, batch_invariant=True),
    _case(2, 3, 33, 53, packed=False, dtype=np.dtype(np.float16)),
    _case(2, 9, 40, 64, dtype=np.dtype(np.float16), with_sink=True),
)
