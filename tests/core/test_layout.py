"""Byte layouts against the published tables, scales against exact arithmetic."""

from fractions import Fraction

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
from hypothesis import example, given

from xmla.core.layout import V32, IndexerLayout, power_of_two_exponent, quantize

E4M3 = ml_dtypes.float8_e4m3fn


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
@example(448.0)
@example(float(np.nextafter(np.float32(448), np.float32(500))))
@example(1.75)
def test_exponent_is_the_exact_one(amax: float) -> None:
    """The smallest e with 448 · 2**e ≥ amax, over the rationals."""
    exponent = int(power_of_two_exponent(np.array([amax], np.float32), -200)[0])
    assert 448 * Fraction(2) ** exponent >= Fraction(amax) > 448 * Fraction(2) ** (exponent - 1)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=128, max_size=128), st.sampled_from([-13, -22]))
def test_quantised_values_are_within_half_a_step(values: list[float], floor: int) -> None:
    x = np.array([values], np.float32)
    q, scale = quantize(x, floor)
    assert scale[0] >= 2.0**floor and np.frexp(scale[0])[0] == 0.5
    back = q.astype(np.float64) * scale[:, None]
    # Three explicit bits: half a step is 2**-4 of a normal value, 2**-10 scales of a subnormal one.
    assert (np.abs(back - x) <= np.maximum(np.abs(x) * 2.0**-4, scale[:, None] * 2.0**-10)).all()


def test_v32_row_byte_by_byte() -> None:
    """656 bytes: 512 e4m3, 4 float32 scales of 128 dims each, 64 bf16 (README of FlashMLA)."""
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((3, 512)).astype(ml_dtypes.bfloat16)
    rope = rng.standard_normal((3, 64)).astype(ml_dtypes.bfloat16)
    rows = V32.write(latent, rope)
    assert rows.shape == (3, 656) and rows.dtype == np.uint8
    for row, x, r in zip(rows, latent.astype(np.float32), rope, strict=True):
        for tile in range(4):
            part = x[128 * tile : 128 * tile + 128]
            scale = row[512 + 4 * tile : 516 + 4 * tile].view(np.float32)[0]
            assert scale == 2.0 ** np.ceil(np.log2(max(np.abs(part).max() / 448, 1e-4)))
            assert np.array_equal(row[128 * tile : 128 * tile + 128], (part / scale).astype(E4M3).view(np.uint8))
        assert np.array_equal(row[528:656], r.view(np.uint8))
    assert np.array_equal(V32.read(rows)[:, 512:], rope.astype(np.float32))


def test_indexer_page_byte_by_byte() -> None:
    """R rows of 128 e4m3, then R float32 scales (DeepGEMM): with R = 64 the scales start at byte 8192."""
    layout = IndexerLayout(128)
    pool = np.zeros((2, 64 * 132 + 12), np.uint8)
    cache = pool[:, : 64 * 132].reshape(2, 64, 132, copy=False)
    values = np.arange(128, dtype=np.uint8)[None].view(E4M3)
    layout.scatter(cache, np.array([64 + 5]), values, np.array([0.25], np.float32))
    assert np.array_equal(pool[1, 5 * 128 : 6 * 128], np.arange(128))
    assert pool[1, 8192 + 20 : 8192 + 24].view(np.float32)[0] == 0.25
    assert np.count_nonzero(pool) == 127 + np.count_nonzero(np.array([0.25], np.float32).view(np.uint8))
    got, scales = layout.gather(cache, np.array([69]))
    assert np.array_equal(got.view(np.uint8)[0], np.arange(128)) and scales[0] == 0.25
