"""Byte layouts against the published tables, scales against exact arithmetic."""

from fractions import Fraction

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given

from xmla.core.errors import ArgumentError
from xmla.core.formats.indexer import INDEXER_FORMATS, IndexerLayout, indexer_layouts
from xmla.core.formats.mla import (
    MLA_LAYOUTS,
    NVFP4,
    NVFP4_BF16,
    NVFP4_FP8,
    NVFP4_NOPE,
    NVFP4_SCALED,
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
from xmla.core.formats.numbers import dequantize_mxfp4, power_of_two_exponent, quantize, quantize_mxfp4
from xmla.core.op import Op
from xmla.core.registry import registry
from xmla.core.values import Spec

E4M3 = ml_dtypes.float8_e4m3fn


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
@example(448.0)
@example(float(np.nextafter(np.float32(448), np.float32(500))))
@example(1.75)
def test_exponent_is_the_exact_one(amax: float) -> None:
    """The smallest e with 448 · 2**e ≥ amax, over the rationals."""
    exponent = int(power_of_two_exponent(np.array([amax], np.float32), 448.0, -200)[0])
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
    cache = np.zeros((1, 3, 656), np.uint8)
    V32.scatter(cache, np.arange(3), latent, rope)
    for row, x, r in zip(cache[0], latent.astype(np.float32), rope, strict=True):
        for tile in range(4):
            part = x[128 * tile : 128 * tile + 128]
            scale = row[512 + 4 * tile : 516 + 4 * tile].view(np.float32)[0]
            assert scale == 2.0 ** np.ceil(np.log2(max(np.abs(part).max() / 448, 1e-4)))
            assert np.array_equal(row[128 * tile : 128 * tile + 128], (part / scale).astype(E4M3).view(np.uint8))
        assert np.array_equal(row[528:656], r.view(np.uint8))
    assert np.array_equal(V32.gather(cache, np.arange(3))[:, 512:], rope.astype(np.float32))


def written(layout, entries: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a page in which one entry is written, and its dims."""
    rng = np.random.default_rng(1)
    entry = rng.standard_normal((1, layout.dims)).astype(ml_dtypes.bfloat16)
    cache = np.zeros((1, entries, layout.row), np.uint8)
    layout.scatter(cache, np.array([slot]), entry[:, : layout.latent], entry[:, layout.latent :])
    return cache.reshape(-1), entry[0].astype(np.float32)


@pytest.mark.parametrize(("entries", "footer"), [(2, 1152), (64, 36864), (128, 73728), (256, 147456)])
def test_v4_page_byte_by_byte(entries: int, footer: int) -> None:
    """448 e4m3 and 64 bf16 at 576 · t, then 7 UE8M0 and a pad at 8 · t of the footer (FlashMLA tests/quant.py)."""
    slot = entries - 1
    page, entry = written(V4, entries, slot)
    for tile in range(7):
        part = entry[64 * tile : 64 * tile + 64]
        scale = 2.0 ** np.ceil(np.log2(max(np.abs(part).max() / 448, 1e-4)))
        assert page[footer + 8 * slot + tile] == np.log2(scale) + 127
        at = 576 * slot + 64 * tile
        assert np.array_equal(page[at : at + 64], (part / scale).astype(E4M3).view(np.uint8))
    assert np.array_equal(page[576 * slot + 448 : 576 * slot + 576].view(ml_dtypes.bfloat16), entry[448:])
    assert page[footer + 8 * slot + 7] == 0
    assert V4.page_multiple * -(-entries * V4.row // V4.page_multiple) in (1728, 37440, 74880, 149760)


@pytest.mark.parametrize(
    ("layout", "values_at", "scales_at"),
    [(V41, 7 * 528, 7 * 528 + 512), (V41_FOOTER, 7 * 512, 61 * 512 + 7 * 16)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_v41_pages_byte_by_byte(layout: MlaLayout, values_at: int, scales_at: int) -> None:
    """512 e4m3 and then 16 UE8M0, an entry after the other (FlashMLA of 2026-09-30); before that release the values at
    512 · t and the scales at 16 · t of the footer. The roped dims are quantised like the others."""
    page, entry = written(layout, 61, 7)
    scales = 2.0 ** (page[scales_at:][:16].astype(np.float64) - 127)
    values = page[values_at:][:512].view(E4M3).astype(np.float64).reshape(16, 32)
    assert (np.abs((values * scales[:, None]).reshape(-1) - entry) <= np.abs(entry) * 2.0**-4 + 2.0**-20).all()
    assert (448 * scales >= np.abs(entry).reshape(16, 32).max(axis=1)).all()
    used = np.flatnonzero(page)  # and nothing else is written
    assert set(used) <= {*range(values_at, values_at + 512), *range(scales_at, scales_at + 16)}


@pytest.mark.parametrize("entries", [1, 61, 64])
def test_v41_allocators(entries: int) -> None:
    """Released pages have no padding; before, theirs were rounded up to the rows that Blackwell's loads take."""
    strides = [layout.page_stride(entries) for layout in (V41, V41_FP4, V41_FOOTER, V41_FP4_FOOTER)]
    assert strides == [528 * entries, 288 * entries, -(-528 * entries // 512) * 512, -(-288 * entries // 256) * 256]


def test_fp4_pages_byte_by_byte() -> None:
    """The low nibble is the even dim. e4m3 scales: behind the values, in the page's footer, or in "nvfp4" permuted."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    behind = 256 + np.arange(32)
    for layout, values_at, places in (
        (V41_FP4, 3 * 288, 3 * 288 + behind),
        (V41_FP4_FOOTER, 3 * 256, 5 * 256 + 3 * 32 + np.arange(32)),
        (NVFP4, 3 * 352, 3 * 352 + 320 + 8 * (np.arange(32) % 4) + np.arange(32) // 4),
        (NVFP4_BF16, 3 * 432, 3 * 432 + behind),
        (V4_NVFP4, 3 * 352, 5 * 352 + 3 * 32 + np.arange(28)),
    ):
        page, entry = written(layout, 5, 3)
        row = page[values_at:]
        count = layout.quantized
        if layout is NVFP4:
            assert np.array_equal(row[256:320].view(E4M3), entry[512:].astype(E4M3))
        elif count < layout.dims:
            roped = row[{NVFP4_BF16: 304, V4_NVFP4: 224}[layout] :][:128].view(ml_dtypes.bfloat16)
            assert np.array_equal(roped, entry[count:].astype(ml_dtypes.bfloat16))
        scales = page[places].view(E4M3).astype(np.float64)
        exact = np.abs(entry[:count]).reshape(-1, 16).max(axis=1) / 6
        if layout is NVFP4:  # vLLM rounds up, so that no value is larger than 6 scales
            assert (scales >= exact).all() and (scales <= exact * 1.125 + 2.0**-9).all()
        else:
            assert (np.abs(scales - exact) <= np.maximum(exact / 16, 2.0**-10)).all()
        codes = np.stack([row[: count // 2] & 15, row[: count // 2] >> 4], axis=1).reshape(count)
        values = np.where(codes & 8, -1, 1) * magnitudes[codes & 7] * np.repeat(scales, 16)
        # One explicit bit: half a step is a quarter of a normal value, and a quarter of a scale below 1.
        bound = np.maximum(np.abs(entry[:count]) / 4, np.repeat(scales, 16) / 4)
        assert (np.abs(values - entry[:count]) <= bound).all()


@pytest.mark.parametrize("layout", [NVFP4_FP8, NVFP4_SCALED, NVFP4_NOPE], ids=lambda layout: layout.name)
def test_entries_with_scales_of_their_own_byte_by_byte(layout: MlaLayout) -> None:
    """256 bytes of values, 32 scales, float32 scales of rope and of the latent dims, 8 of padding, 64 e4m3."""
    page, entry = written(layout, 5, 3)
    row = page[3 * layout.row : 4 * layout.row]
    latent, rope = entry[:512], entry[512:]
    of_rope, of_latent = row[288:296].view(np.float32)
    scaled = layout is not NVFP4_FP8
    assert of_latent == (np.abs(latent).max() / np.float32(2688) if scaled else 0)
    if layout.rope:
        assert of_rope == np.abs(rope).max() / np.float32(448)
        assert np.array_equal(row[304:].view(E4M3), (rope / of_rope).astype(E4M3))
    outer = of_latent if scaled else np.float32(1)
    scales = row[256:288].view(E4M3).astype(np.float64)
    exact = np.abs(latent / outer).reshape(32, 16).max(axis=1) / 6
    assert (np.abs(scales - exact) <= np.maximum(exact / 16, 2.0**-10)).all()
    assert not scaled or scales.max() == 448
    codes = np.stack([row[:256] & 15, row[:256] >> 4], axis=1).reshape(512)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    whole = values * np.repeat(scales, 16) * outer
    bound = np.maximum(np.abs(latent) / 4, np.repeat(scales, 16) * outer / 4)
    assert (np.abs(whole - latent) <= bound).all()
    assert not row[296:304].any() and not page[: 3 * layout.row].any()


@pytest.mark.parametrize("value", [0.0, 2.0**-120, np.inf], ids=str)
def test_scales_of_whole_entries_stay_finite(value: float) -> None:
    """Of zeros, of what is below the least scale, and of infinities, which saturate."""
    latent, rope = np.full((1, 512), value, np.float32), np.full((1, 64), value, np.float32)
    cache = np.zeros((1, 2, 368), np.uint8)
    NVFP4_SCALED.scatter(cache, np.array([1]), latent, rope)
    found = NVFP4_SCALED.gather(cache, np.array([1]))
    assert np.isfinite(found).all()
    if not np.isfinite(value):
        assert (found > 1e38).all()


def test_v4_mxfp4_entries_byte_by_byte() -> None:
    """224 bytes e2m1, 14 UE8M0 of 32 dims each, a pad of 2 bytes, 64 bf16 roped dims; nothing behind the entries."""
    page, entry = written(V4_MXFP4, 5, 3)
    row, latent = page[3 * 368 : 4 * 368], entry[:448]
    scales = 2.0 ** (row[224:238].astype(np.float64) - 127)
    assert np.array_equal(scales, 2.0 ** np.ceil(np.log2(np.abs(latent).reshape(14, 32).max(axis=1) / 6)))
    codes = np.stack([row[:224] & 15, row[:224] >> 4], axis=1).reshape(448)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1) * np.repeat(scales, 32)
    assert (np.abs(values - latent) <= np.maximum(np.abs(latent) / 4, np.repeat(scales, 32) / 4)).all()
    assert not row[238:240].any() and np.array_equal(row[240:].view(ml_dtypes.bfloat16).astype(np.float32), entry[448:])
    assert not page[: 3 * 368].any() and not page[4 * 368 :].any()


def formats_served(op: Op) -> set[MlaLayout | IndexerLayout]:
    """The formats of its cases' caches."""
    served = set()
    for case in op.cases:
        specs = {argument: Spec.of_numpy(array) for argument, array in case.make(np.random.default_rng(0)).items()}
        served.update(op.bind(specs, op.attributes(**case.attrs)).formats.values())
    return served


@pytest.mark.parametrize("name", ["write_mla_cache", "read_mla_cache", "convert_mla_cache", "sparse_mla"])
def test_every_format_has_cases(name: str) -> None:
    """Of the ops that take any format."""
    assert formats_served(registry()[name]) == set(MLA_LAYOUTS)


@given(
    st.integers(0, len(MLA_LAYOUTS) - 1),
    st.integers(1, 70),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["scale", "amax"]),
)
def test_entries_survive_in_every_format(which: int, entries: int, seed: int, floor: str) -> None:
    """What is gathered differs from what was scattered by the rounding of its format, wherever the entry stands."""
    layout, rng = MLA_LAYOUTS[which], np.random.default_rng(seed)
    padding = layout.alignment * int(rng.integers(0, 9))
    pool = np.full((3, entries * layout.row + padding), 255, np.uint8 if layout.packed else np.float16)
    cache = pool[:, : entries * layout.row].reshape(3, entries, layout.row, copy=False)
    slots = rng.permutation(3 * entries)[: 2 * entries]
    entry = (rng.standard_normal((len(slots), layout.dims)) * np.exp2(rng.integers(-5, 6))).astype(np.float16)
    layout.scatter(cache, slots, entry[:, : layout.latent], entry[:, layout.latent :], floor)
    # Half a step of e2m1 is at most a quarter of the value or of a 24th of its tile's largest; the others are finer.
    # A scale that is rounded down by half of e4m3's least, 2**-10, takes 6 of those from the largest value.
    x = entry.astype(np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True)
    lost = 6 * 2.0**-10 if layout.scale == "e4m3" and not layout.scale_up else 2.0**-9
    assert (np.abs(layout.gather(cache, slots) - x) <= np.maximum(np.abs(x) / 4, largest / 12) + lost).all()
    assert (pool[:, entries * layout.row :] == 255).all()


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


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by code (OCP microscaling formats, table of FP4)


def test_mxfp4_page_byte_by_byte() -> None:
    """R rows of D/2 bytes, even dims in the low nibbles, then 4 scale bytes per entry; 127 without a block."""
    for dim, row in ((128, 68), (64, 36), (32, 20)):
        layout = IndexerLayout(dim, "mxfp4")
        assert layout.row == row
        keys = np.zeros((1, dim), np.float32)
        keys[0, :6] = [6, -0.0, 0.5, -1.5, 3, 4]
        keys[0, dim - 1] = -24  # in the last block the scale is 4, in a block of zeros the least
        pool = np.zeros((2, 64 * row + 12), np.uint8)
        cache = pool[:, : 64 * row].reshape(2, 64, row, copy=False)
        layout.scatter(cache, np.array([64 + 5]), *layout.quantize(keys))
        values, footer = pool[1, 5 * dim // 2 : 6 * dim // 2], pool[1, 32 * dim + 20 : 32 * dim + 24]
        if dim > 32:
            assert values[:4].tolist() == [0x87, 0xB1, 0x65, 0] and values[-1] == 0xF0
            assert footer.tolist() == [127, *[1] * (dim // 32 - 2), 129, *[127] * (4 - dim // 32)]
        else:  # one block: 0.5 / 4 is under half a step, −1.5 / 4 is over
            assert values[:4].tolist() == [0x83, 0x90, 0x22, 0] and values[-1] == 0xF0
            assert footer.tolist() == [129, 127, 127, 127]
        assert not pool[0].any() and not pool[1, 64 * row :].any()


def test_ties_go_to_even_codes_and_zero_keeps_its_sign() -> None:
    """The rule of `cvt.rn.satfinite.e2m1x2`, not that of DeepGEMM's Python encoder (ties down, no −0)."""
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    for sign, bit in ((1, 0), (-1, 8)):
        block = np.full((1, 32), 6.0, np.float32)
        block[0, :7], block[0, 7] = middles * sign, 0.0 * sign
        packed, scales = quantize_mxfp4(block, -126)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(-1)
        assert scales.tolist() == [[127]]
        assert codes[:8].tolist() == [c | bit for c in (0, 2, 2, 4, 4, 6, 6, 0)]


def test_scale_255_is_nan_and_scale_0_is_not_zero() -> None:
    keys = np.ones((1, 64), np.float32)
    keys[0, 40] = np.nan
    packed, scales = quantize_mxfp4(keys, -126)
    assert scales.tolist() == [[125, 255]]
    back = dequantize_mxfp4(packed, scales)
    assert (back[0, :32] == 1).all() and np.isnan(back[0, 32:]).all()
    assert (dequantize_mxfp4(np.full((1, 16), 0x22, np.uint8), np.zeros((1, 1), np.uint8)) == 2.0**-127).all()
    assert (dequantize_mxfp4(*quantize_mxfp4(np.full((1, 32), np.inf, np.float32), -126)) == 6 * 2.0**126).all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
@example([6.0, *[0.0] * 31])
@example([float(np.nextafter(np.float32(6), np.float32(7))), *[-0.25] * 31])
@example([1e-45] * 32)
def test_mxfp4_is_the_nearest_under_the_least_scale(values: list[float]) -> None:
    x = np.array([values], np.float32)
    packed, scales = quantize_mxfp4(x, -126)
    exponent = int(scales[0, 0]) - 127
    amax = max(Fraction(abs(float(v))) for v in x[0])
    assert 6 * Fraction(2) ** exponent >= amax
    assert exponent == -126 or amax > 6 * Fraction(2) ** (exponent - 1)
    back = dequantize_mxfp4(packed, scales)[0]
    grid = np.concatenate([-E2M1[::-1], E2M1]) * 2.0**exponent
    for value, got in zip(x[0].astype(np.float64), back, strict=True):
        assert abs(got - value) == np.abs(grid - value).min() and np.signbit(got) == np.signbit(value)


def test_a_row_and_a_dim_tell_the_format_and_a_row_alone_only_some() -> None:
    for dim, fp8, mxfp4 in ((128, 132, 68), (64, 68, 36), (32, 36, 20)):
        assert indexer_layouts(fp8, dim) == [IndexerLayout(dim)]
        assert indexer_layouts(mxfp4, dim) == [IndexerLayout(dim, "mxfp4")]
    assert [len(indexer_layouts(row)) for row in (132, 68, 36, 20, 100)] == [1, 2, 2, 1, 0]


def test_ue8m0_scales_are_named_and_have_keys_of_128_dims() -> None:
    (layout,) = indexer_layouts(132, 128, "fp8_ue8m0")
    assert layout == IndexerLayout(128, "fp8_ue8m0") and not indexer_layouts(68, 64, "fp8_ue8m0")
    with pytest.raises(ArgumentError, match="indexer's cache: 'fp8_ue8m0' has keys of 128 dims, got 64"):
        IndexerLayout(64, "fp8_ue8m0")


def test_ue8m0_page_byte_by_byte() -> None:
    """128 e4m3 of each entry, then four times the exponent's byte of each scale (vLLM's `pack_ue8m0_x4`)."""
    layout, page = IndexerLayout(128, "fp8_ue8m0"), np.zeros((1, 2, 132), np.uint8)
    keys = np.stack([np.full(128, 448.0, np.float32), np.full(128, 3.5, np.float32)])
    layout.scatter(page, np.arange(2), *layout.quantize(keys))
    flat = page.reshape(-1)
    assert (flat[:256] == 0x7E).all() and flat[256:].tolist() == [127] * 4 + [120] * 4


def test_every_format_of_indexer_keys_has_cases() -> None:
    """Of every op over caches of such keys."""
    ops = {name: formats_served(op) for name, op in registry().items() if any(t.format for t in op.tensors.values())}
    served = {
        name: {keys.format for keys in formats if isinstance(keys, IndexerLayout)} for name, formats in ops.items()
    }
    assert sum(map(bool, served.values())) == 12
    assert {name for name, formats in served.items() if formats and formats != set(INDEXER_FORMATS)} == set()
