import ml_dtypes
import numpy as np

from xmla.core.formats.indexer import IndexerLayout, ue8m0_words
from xmla.core.formats.numbers import NAN_SCALE
from xmla.core.op import Case

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def whole_numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Values whose products and sums every dtype holds exactly: logits tie often, and no rounding decides."""
    return rng.integers(-2, 3, shape).astype(np.float32)


def exact_query(rng: np.random.Generator, tokens: int, heads: int, dim: int) -> dict[str, np.ndarray]:
    return {"q8": whole_numbers(rng, tokens, heads, dim).astype(E4M3), "weights": whole_numbers(rng, tokens, heads)}


def exact_keys(rng: np.random.Generator, layout: IndexerLayout, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Stored keys of the same kind, three of them NaN."""
    keys = whole_numbers(rng, count, layout.dim)
    values, scales = keys.astype(E4M3), np.ldexp(np.float32(1), rng.integers(-3, 1, count)).astype(np.float32)
    if layout.format == "mxfp4":
        values, scales = layout.quantize(keys)
    if layout.format == "fp8_ue8m0":
        scales = ue8m0_words(scales)
    scales[rng.integers(0, count, 3)] = np.nan if layout.format == "fp8" else NAN_SCALE
    return values, scales


def make_case(
    name: str, tokens: int, heads: int, keys: int, k: int, dim: int = 32, layout: str = "fp8",
    **attrs: int,
) -> Case:  # fmt: skip
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        starts = rng.integers(0, keys // 4, tokens).astype(np.int32)
        ends = (starts + rng.integers(0, keys, tokens)).astype(np.int32)
        starts[0], ends[0] = 0, keys
        if tokens > 2:
            starts[1], ends[1] = 7, 7  # empty
            starts[-1], ends[-1] = -5, keys + 1000  # clamped
        values, scales = exact_keys(rng, IndexerLayout(dim, layout), keys)
        return {
            **exact_query(rng, tokens, heads, dim),
            "keys": values,
            "key_scales": scales,
            "starts": starts,
            "ends": ends,
        }

    return Case(name, make, {"k": k, **attrs})


# Second, which several tests take, is the lightest of the kernel in bounded memory. Keys are as few as still do not fit
# the workspace as logits, and more than four blocks of 512: candidates are reduced between blocks, then at the end; the
# last block and its last tile are not full.
CASES = (
    make_case("fits", 5, 4, 300, 20),
    make_case("bounded-rows-shorter-than-k", 2, 16, 4000, 3000, workspace_bytes=70_000),
    make_case(
        "bounded-one-program", 7, 4, 3300, 20, workspace_bytes=148_000
    ),  # a group of 8 tokens, one of them missing
    # Three groups of 2 tokens, the last one not full: the first program has two of them.
    make_case("bounded-two-programs", 5, 64, 2300, 100, dim=128, workspace_bytes=80_000),
    make_case(
        "parts", 70, 4, 300, 20, workspace_bytes=650_000
    ),  # of 64 and 6 tokens: none has fewer than 64 but the last
    make_case("bounded-mxfp4", 4, 4, 2600, 20, layout="mxfp4", workspace_bytes=74_000),
    make_case("all-selected", 5, 4, 60, 64, workspace_bytes=0),
    make_case("ue8m0", 5, 4, 300, 20, dim=128, layout="fp8_ue8m0"),
    make_case("bounded-ue8m0", 5, 64, 2300, 100, dim=128, layout="fp8_ue8m0", workspace_bytes=80_000),
)
