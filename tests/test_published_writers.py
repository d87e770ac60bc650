"""DeepSeek-V4.1's entries byte for byte as its published writers store them, restated here from their sources.

- FlashMLA of 2026-09-30, tests/quant.py: both formats, and "scale", the floor of the scale.
- vLLM, models/deepseek_v41/common/ops: cache_utils.py (MXFP8), fused_compress_quant_cache.py (NVFP4), and "amax", the
  floor of the largest magnitude.
Released pages have an entry's scales behind its values; before, both projects had them in the page's footer.
"""

import kit
import ml_dtypes
import numpy as np
import pytest

from xmla import torch_api
from xmla.core.formats.mla import V41, V41_FOOTER, V41_FP4, V41_FP4_FOOTER, MlaLayout

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by code
EVEN_FIRST = np.array([0, 2, 4, 6, 1, 3, 5, 7])
POSITIVE_E4M3 = np.arange(1, 0x7F, dtype=np.uint8).view(E4M3).astype(np.float64)
ENTRIES = 5  # a page


def mxfp8(entry: np.ndarray, floor: str) -> tuple[np.ndarray, np.ndarray]:
    """512 bytes of values and 16 of scales of float64 [512]."""
    values, scales = [], []
    for tile in entry.reshape(16, 32):
        amax = np.abs(tile).max()
        least = max(amax / 448, 1e-4) if floor == "scale" else max(amax, 1e-4) / 448
        exponent = int(np.ceil(np.log2(least)))
        values.append(np.clip(tile / 2.0**exponent, -448, 448).astype(E4M3).view(np.uint8))
        scales.append(min(max(exponent + 127, 0), 255))
    return np.concatenate(values), np.array(scales, np.uint8)


def nvfp4(entry: np.ndarray, floor: str) -> tuple[np.ndarray, np.ndarray]:
    """256 bytes of values and 32 of scales of float64 [512]; the scale's floor is the least of e4m3, in both."""
    values, scales = [], []
    for tile in entry.reshape(32, 16):
        scale = np.array(min(max(np.abs(tile).max() / 6, 2.0**-9), 448)).astype(E4M3)
        within = np.minimum(np.abs(tile / float(scale)), 6)
        away = np.abs(within[:, None] - E2M1[EVEN_FIRST])  # of two as near, argmin has the first
        codes = EVEN_FIRST[away.argmin(axis=1)] + 8 * np.signbit(tile)
        values.append(codes[::2] + 16 * codes[1::2])
        scales.append(scale.view(np.uint8))
    return np.concatenate(values).astype(np.uint8), np.array(scales)


def published_page(layout: MlaLayout, entries: np.ndarray, floor: str) -> np.ndarray:
    """The bytes of a page of `entries`: each one's scales behind its values, or all of them behind all values."""
    stored = [(mxfp8 if layout.row == 528 else nvfp4)(entry, floor) for entry in entries]
    if layout.name.endswith("footer"):
        return np.concatenate([*(values for values, _ in stored), *(scales for _, scales in stored)])
    return np.concatenate([part for pair in stored for part in pair])


def tiles(size: int) -> np.ndarray:
    """Tiles [N, size] of bfloat16 at the rules' edges: floors, ties of scales and of values, signs, saturation."""
    rng = np.random.default_rng(0)
    middles = (POSITIVE_E4M3[1:] + POSITIVE_E4M3[:-1]) / 2
    edges = np.concatenate([
        6 * middles,  # where e4m3 scales are as near to one as to the next
        *(top * np.exp2(np.arange(-16, 16, 3)) for top in (448, 6)),  # where powers of two go up
        [0.0, 1e-30, 1e-4, 448 * 1e-4, 448 * 2.0**-13, 6 * 2.0**-9, 6 * 2.0**-10, 6 * 448, 6 * 464, 1e5, 3e38],
    ]).astype(BF16)  # fmt: skip
    bits = edges.view(np.uint16)[:, None] + np.array([-1, 0, 1])  # and their neighbours in bfloat16
    largest = np.maximum(bits, 0).astype(np.uint16).view(BF16).astype(np.float64).reshape(-1, 1)
    # A part of the largest each: half steps of e2m1, of e4m3, and any, of either sign.
    parts = np.concatenate([(E2M1[1:] + E2M1[:-1]) / 12, rng.choice(middles, size - 12) / 448, rng.uniform(-1, 1, 3)])
    signs = rng.choice([-1.0, 1.0], (len(largest), size))
    found = np.concatenate([largest, largest * 0.0, largest * parts], axis=1) * signs
    return found.astype(BF16)


def write(layout: MlaLayout, entries: np.ndarray, floor: str, device: str) -> np.ndarray:
    """What the kernel stores of entries [T, 512], pages of ENTRIES as bytes, with the reference's equal to them."""
    pages = len(entries) // ENTRIES
    arguments = [entries[:, :448], entries[:, 448:], np.arange(len(entries), dtype=np.int32)]
    cache = kit.to_torch(np.full((pages, ENTRIES, layout.row), 0xAA, np.uint8), device)
    torch_api.write_mla_cache(
        *(kit.to_torch(a, device) for a in arguments), cache, cache_format=layout.name, scale_floor=floor
    )
    want = np.full((pages, ENTRIES, layout.row), 0xAA, np.uint8)
    layout.scatter(want, arguments[2], *arguments[:2], floor)
    kit.assert_bits_equal("cache", cache, want)
    return want.reshape(pages, -1)


@pytest.mark.parametrize("floor", ["scale", "amax"])
@pytest.mark.parametrize("layout", [V41, V41_FP4, V41_FOOTER, V41_FP4_FOOTER], ids=lambda layout: layout.name)
def test_bytes_are_the_published_writers(device: str, layout: MlaLayout, floor: str) -> None:
    each = np.random.default_rng(1).permutation(tiles(layout.tile))
    pages = -(-len(each) // (ENTRIES * layout.scales))
    entries = np.resize(each, (pages * ENTRIES, 512))  # the first ones again where the last page has room
    for page, written in zip(entries.reshape(-1, ENTRIES, 512), write(layout, entries, floor, device), strict=True):
        assert np.array_equal(written, published_page(layout, page.astype(np.float64), floor))


@pytest.mark.parametrize("layout", [V41, V41_FP4], ids=lambda layout: layout.name)
def test_the_two_floors(device: str, layout: MlaLayout) -> None:
    """A tile of zeros has the least scale: of MXFP8 2**-13 or 2**-22, of NVFP4 2**-9 by both rules."""
    entries = np.zeros((ENTRIES, 512), BF16)
    entries[1, 100] = -0.0
    least = {"scale": 127 - 13, "amax": 127 - 22} if layout is V41 else {"scale": 1, "amax": 1}
    for floor, byte in least.items():
        rows = write(layout, entries, floor, device).reshape(ENTRIES, layout.row)
        assert (rows[:, layout.scale_offset :] == byte).all()
        values = rows[:, : layout.scale_offset]
        assert values[1, 100 if layout is V41 else 50] == (0x80 if layout is V41 else 0x08)
        assert np.count_nonzero(values) == 1


def test_nan(device: str) -> None:
    """e4m3 has NaN: it stays one and does not count. e2m1 has none: its tile's scale is NaN, as FlashMLA's.

    The writers differ in MXFP8: a NaN makes FlashMLA's whole tile NaN, and vLLM's kernel stores a number for it.
    """
    whole = np.random.default_rng(0).standard_normal((ENTRIES, 512)).astype(BF16)
    broken = whole.copy()
    whole[2, 40], broken[2, 40] = 0.0, np.nan
    fp8, clean = (write(V41, entries, "scale", device).reshape(ENTRIES, 528) for entries in (broken, whole))
    assert fp8[2, 40] & 0x7F == 0x7F and np.count_nonzero(fp8 != clean) == 1
    fp4, clean = (write(V41_FP4, entries, "scale", device).reshape(ENTRIES, 288) for entries in (broken, whole))
    assert fp4[2, 256 + 40 // 16] == 0x7F
    changed = np.argwhere(fp4 != clean)
    assert (changed[:, 0] == 2).all() and set(changed[:, 1]) <= {*range(32 // 2, 48 // 2), 256 + 40 // 16}
    cache = kit.to_torch(fp4[None], device)
    rows = kit.as_numpy(torch_api.read_mla_cache(cache, kit.to_torch(np.arange(ENTRIES, dtype=np.int32), device),
                                                 cache_format="v41_fp4", dtype="float32"))  # fmt: skip
    assert np.isnan(rows[2, 32:48]).all() and np.isnan(rows).sum() == 16
