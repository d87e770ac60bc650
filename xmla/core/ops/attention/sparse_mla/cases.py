import numpy as np

from xmla.core.formats.mla import (
    NOPE,
    NVFP4,
    NVFP4_BF16,
    NVFP4_FP8,
    NVFP4_NOPE,
    NVFP4_SCALED,
    PLAIN,
    PLAIN_V4,
    V4,
    V4_MXFP4,
    V4_NVFP4,
    V32,
    V41,
    V41_FOOTER,
    V41_FP4,
    V41_FP4_FOOTER,
    MlaLayout,
)
from xmla.core.op import Case
from xmla.core.ops.cases import BF16, empty_pages, mla_pool, normal

INVALID = (-(2**31), -123456, -1, 2**31 - 1)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def _source(
    rng: np.random.Generator, layout: MlaLayout, tokens: int, keys: int, entries: int, with_lengths: bool, padding: int,
    dtype: np.dtype, first: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """A pool, slots into it and lengths, odd ones from token `first` on. Only what is read holds keys."""
    pages = -(-2 * keys // entries) + 1
    total = pages * entries
    named = rng.permutation(total)[: 3 * total // 4]  # the others by no token
    slots = np.stack([rng.permutation(named)[:keys] for _ in range(tokens)]).astype(np.int32)
    lengths = rng.integers(0, keys + 1, tokens).astype(np.int32)
    if tokens > 2:
        lengths[np.arange(first, first + 3) % tokens] = keys + 5, 0, -3  # clamped
    # Past a row's length stand slots of NaN entries and garbage.
    visible = lengths if with_lengths else np.full(tokens, keys)
    used = slots[np.arange(keys) < visible[:, None]]
    bad = (rng.random(slots.shape) < 0.1) & ((np.arange(keys) % 7) > 0)
    slots = np.where(bad, rng.choice([*INVALID, total], slots.shape), slots).astype(np.int32)
    if tokens > 1:
        slots[-1] = rng.choice(INVALID, keys)  # nothing valid
    return mla_pool(rng, layout, pages, entries, used, padding, dtype), slots, lengths


def make_case(
    tokens: int, heads: int, keys: int, entries: int, layout: MlaLayout = V32, dtype: np.dtype = BF16,
    with_lengths: bool = False, with_sink: bool = False, padding: int = 0,
    extra: tuple[MlaLayout, int, int] | None = None, rotate: bool = False, rows: bool = False, **attrs: object,
) -> Case:  # fmt: skip
    """`rows`: beside packed entries; they are never read."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        cache, slots, lengths = _source(rng, layout, tokens, keys, entries, with_lengths, padding, dtype)
        inputs = {
            "q": normal(rng, heads, tokens, layout.dims, dtype=dtype).transpose(1, 0, 2),
            "cache": cache,
            "slots": slots,
        }
        if with_lengths:
            inputs["lengths"] = lengths
        if with_sink:
            inputs["sink"] = normal(rng, heads, dtype=F32, scale=3.0)
            inputs["sink"][:2] = [np.inf, -np.inf][:heads]
        if extra is not None:
            other, extra_keys, extra_entries = extra
            source = _source(rng, other, tokens, extra_keys, extra_entries, with_lengths, padding, dtype, first=1)
            inputs["extra_cache"], inputs["extra_slots"], lengths = source
            if with_lengths:
                inputs["extra_lengths"] = lengths
        if rotate:
            angles = rng.uniform(0, 2 * np.pi, (9, 32))
            inputs["cos_sin"] = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
            inputs["positions"] = rng.integers(-1, 10, tokens).astype(np.int32)
        for source, of in (("", layout), ("extra_", extra and extra[0])):
            if rows and of is not None and of.packed:
                pool = inputs[f"{source}cache"]
                inputs[f"{source}rows"] = empty_pages(len(pool), pool.shape[1], layout.dims, dtype)
        return inputs

    kind = layout.name + ("" if extra is None else f"+{extra[0].name}") + ("" if dtype == BF16 else f"-{dtype.name}")
    name = f"t{tokens}-h{heads}-k{keys}-page{entries}-{kind}{'-sink' if with_sink else ''}{'-rotate' if rotate else ''}"
    name += "-rows" * rows
    return Case(name, make, {"softmax_scale": 0.0721688, **attrs})


CASES = (
    make_case(1, 128, 130, 64),
    make_case(4, 16, 70, 2, with_lengths=True, with_sink=True, padding=656),
    make_case(3, 5, 257, 61, with_lengths=True, empty_lse="+inf"),
    make_case(2, 40, 64, 576, with_sink=True, batch_invariant=True),
    make_case(2, 64, 100, 1, PLAIN, with_sink=True),
    make_case(5, 8, 600, 69, PLAIN, with_lengths=True, padding=8, batch_invariant=True),
    make_case(2, 3, 33, 53, PLAIN, F16),
    make_case(2, 9, 40, 64, dtype=F16, with_sink=True),
    make_case(4, 20, 130, 64, V4, with_lengths=True, with_sink=True, padding=64, extra=(V4, 70, 2), rotate=True),
    make_case(3, 64, 70, 61, V4, with_sink=True, padding=2, lse_base="2", lse_sink=True),
    make_case(
        3, 7, 33, 2, V4, with_lengths=True, extra=(V41_FP4, 150, 53), rotate=True, batch_invariant=True,
        extra_cache_format="v41_fp4",
    ),
    make_case(4, 70, 200, 64, V4, with_lengths=True, with_sink=True, padding=16, extra=(V4, 130, 2), lse_sink=True),
    make_case(3, 5, 70, 4, V4, with_lengths=True, empty_lse="+inf", lse_base="2"),
    make_case(
        2, 5, 40, 64, V41, F16, with_sink=True, extra=(V41_FP4, 20, 64), cache_format="v41",
        extra_cache_format="v41_fp4", lse_sink=True,
    ),
    make_case(
        2, 4, 33, 61, V41_FOOTER, with_lengths=True, padding=16, extra=(V41_FP4_FOOTER, 20, 2), rotate=True,
        cache_format="v41_footer", extra_cache_format="v41_fp4_footer",
    ),
    make_case(2, 9, 65, 3, NOPE, with_lengths=True, cache_format="nope"),
    make_case(3, 4, 40, 64, NVFP4, with_sink=True, lse_base="2"),
    make_case(2, 9, 33, 5, NVFP4_BF16, with_lengths=True),
    make_case(2, 9, 40, 61, NVFP4_FP8, with_sink=True, cache_format="nvfp4_fp8"),
    make_case(3, 5, 33, 64, NVFP4_SCALED, with_lengths=True, cache_format="nvfp4_scaled"),
    make_case(2, 17, 40, 3, NVFP4_NOPE, padding=4),
    make_case(2, 5, 40, 64, V4, extra=(V4_NVFP4, 30, 2), rotate=True),
    make_case(2, 9, 33, 5, V4_MXFP4, with_sink=True, cache_format="v4_mxfp4"),
    make_case(3, 4, 33, 61, V4_NVFP4, with_sink=True, padding=2),
    make_case(2, 17, 40, 5, PLAIN_V4, extra=(V4, 30, 64), rotate=True),
    make_case(90, 17, 40, 27, with_lengths=True, padding=656),  # entries are unpacked first
    make_case(100, 18, 33, 2, V4, F16, with_sink=True, rotate=True),
    make_case(2, 5, 20, 4, V4, with_lengths=True, extra=(V4, 9, 2), rows=True),
)  # fmt: skip
