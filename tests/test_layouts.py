"""`xmla.layouts`: a pool's format told from its bytes, and pools converted as wholes, in every kind of array."""

import jax.numpy as jnp
import kit
import numpy as np
import pytest

from xmla import ArgumentError, layouts
from xmla.core.cases import mla_pool
from xmla.core.layout import MLA_LAYOUTS, NOPE, PLAIN_V4, V4, V32, V41, V41_FP4, MlaLayout

PACKED = [layout for layout in MLA_LAYOUTS if layout.packed]
KINDS = {"numpy": lambda pool: pool, "torch": lambda pool: kit.to_torch(pool, "cpu"), "jax": jnp.asarray}


def pool_of(layout: MlaLayout, pages: int = 3, entries: int = 16, padding: int = 0) -> np.ndarray:
    """A pool in which a part of the entries is written and the rest is zero or NaN."""
    rng = np.random.default_rng(0)
    used = rng.permutation(pages * entries)[: pages * entries // 2]
    return mla_pool(rng, layout, pages, entries, used, padding)


@pytest.mark.parametrize("layout", PACKED, ids=lambda layout: layout.name)
@pytest.mark.parametrize("entries", [2, 61])
def test_inspect_names_what_a_writer_stored(layout: MlaLayout, entries: int) -> None:
    found = layouts.inspect(kit.to_torch(pool_of(layout, entries=entries, padding=16), "cpu"))
    assert found.format == layout.name, found.reason
    assert found.power_of_two is (True if layout.scale == "float32" else None)


def test_inspect_tells_scales_that_are_no_powers_of_two() -> None:
    pool = pool_of(V32)
    pool[0, :, 512:516] = np.frombuffer(np.float32(0.3).tobytes(), np.uint8)
    assert layouts.inspect(pool).power_of_two is False


def test_inspect_does_not_guess() -> None:
    assert layouts.inspect(np.zeros((2, 4, 528), np.uint8)) == layouts.Inspection(
        None, None, "v41: nothing is written in the pages read; nope: nothing is written in the pages read"
    )
    assert layouts.inspect(np.zeros((2, 4, 600), np.uint8)).reason == (
        "no format has rows of 600 bytes; known are 656, 584, 528, 288, 528, 352"
    )
    garbage = np.random.default_rng(0).integers(0, 256, (2, 64, 656), np.uint8)
    found = layouts.inspect(garbage)
    assert found.format is None and found.reason.startswith("v32: ")
    with pytest.raises(ArgumentError, match=r"pool rank is 2, expected 3 \(P, R, ROW\)"):
        layouts.inspect(np.zeros((2, 656), np.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("source", "target"), [(V4, V41_FP4), (NOPE, PLAIN_V4), (PLAIN_V4, V41)], ids=lambda x: x.name)
def test_convert(source: MlaLayout, target: MlaLayout, kind: str) -> None:
    """Each entry of the new pool is the old one's, read exactly and rounded once."""
    pool = pool_of(source)
    got = kit.as_numpy(layouts.convert(KINDS[kind](pool), target.name))
    every = np.arange(pool.shape[0] * pool.shape[1])
    want = np.zeros((*pool.shape[:2], target.row), got.dtype)
    rows = source.gather(pool, every)
    target.scatter(want, every, rows[:, : target.latent], rows[:, target.latent :])
    kit.assert_bits_equal("pool", got, want)


def test_convert_allocates_pages_as_the_format_wants_them() -> None:
    converted = layouts.convert(kit.to_torch(pool_of(PLAIN_V4, entries=64), "cpu"), "v4")
    assert converted.stride() == (37440, 584, 1)  # 64 · 584 rounded up to a multiple of 576 (FlashMLA tests/quant.py)


def test_convert_refuses() -> None:
    with pytest.raises(ArgumentError, match="convert: cache_format is 'v5', expected one of v32, v4, v41"):
        layouts.convert(pool_of(V4), "v5")
    with pytest.raises(ArgumentError, match="source_format is None, expected a name, because v41: nothing is written"):
        layouts.convert(np.zeros((2, 4, 528), np.uint8), "v4")
    with pytest.raises(ArgumentError, match="cache format is 'v4', expected one with the dims of 'v32'"):
        layouts.convert(pool_of(V32), "v4")
    with pytest.raises(ArgumentError, match="scale_floor is 'none', expected 'scale' or 'amax'"):
        layouts.convert(pool_of(V32), "nvfp4", scale_floor="none")
