"""Formats of the latent cache: the place of every byte of an entry."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from xmla.core.formats.numbers import VALUES, power_of_two_exponent, quantize, quantize_nvfp4
from xmla.core.values import Spec, cdiv


@dataclass(frozen=True, slots=True)
class MlaLayout:
    """Entries of a latent cache [P, R, ROW]: `latent` dims and then `rope` dims, in bytes or as plain rows.

    A page holds the data of its R entries. Their scales follow in the page's footer if the format has one, else they
    are inside each entry. Kernels take a layout as one constexpr.

    Attributes:
        row: The last axis of the cache: bytes per entry, or elements of a plain row.
        latent: Dims before the roped ones.
        rope: Roped dims.
        rope_in_value: Whether attention's values are all dims (one vector is key and value), else the latent ones.
        values: Element type of the latent dims: "e4m3", "e2m1" (two per byte, the even dim in the low nibble) or
            "plain".
        tile: Dims that share a scale.
        scale: Type of a scale: "float32", "ue8m0" (a byte e stands for 2**(e − 127)) or "e4m3".
        scale_up: Whether an e4m3 scale is max|x| / 6 rounded up instead of to nearest (`quantize_nvfp4`).
        scale_offset: First byte of an entry's scales within it; has no meaning with a footer.
        interleaved: Whether scale g is at place 8 · (g mod 4) + g div 4 instead of g.
        footer: Bytes per entry in the page's footer.
        outer_scale: First byte of a float32 by which all scales of an entry are multiplied, or 0.
        rope_values: Element type of the roped dims: "bfloat16", "e4m3" without scales of tiles, "plain", "quantized"
            like the latent dims, whose tiles they continue, or "none".
        rope_offset: First byte, or element of a plain row, of the roped dims.
        rope_scale: First byte of a float32 by which e4m3 roped dims are multiplied, or 0.
        page_multiple: Allocators round the bytes of a page up to a multiple of this; readers take any page stride.
    """

    name: str
    row: int
    latent: int = 512
    rope: int = 64
    rope_in_value: bool = False
    values: str = "e4m3"
    tile: int = 128
    scale: str = "float32"
    scale_up: bool = False
    scale_offset: int = 512
    interleaved: bool = False
    footer: int = 0
    outer_scale: int = 0
    rope_values: str = "bfloat16"
    rope_offset: int = 512
    rope_scale: int = 0
    page_multiple: int = 1

    @property
    def packed(self) -> bool:
        """Whether rows are bytes, not plain elements."""
        return self.values != "plain"

    @property
    def dims(self) -> int:
        """Dims of an entry as a key."""
        return self.latent + self.rope

    @property
    def tail(self) -> int:
        """Dims of keys that values do not have: the roped dims, or 0 if they are in the value."""
        return 0 if self.rope_in_value else self.rope

    @property
    def data(self) -> int:
        """Distance between the data of neighbouring entries within a page."""
        return self.row - self.footer

    def page_stride(self, entries: int) -> int:
        """Elements from page to page in the format's allocators."""
        return cdiv(entries * self.row, self.page_multiple) * self.page_multiple

    @property
    def value_bits(self) -> int:
        return 4 if self.values == "e2m1" else 8

    @property
    def quantized(self) -> int:
        """Dims that have a scale; they come first."""
        return self.dims if self.rope_values == "quantized" else self.latent

    @property
    def scales(self) -> int:
        """Scales of an entry."""
        return self.quantized // self.tile

    @property
    def scale_bytes(self) -> int:
        return 4 if self.scale == "float32" else 1

    @property
    def alignment(self) -> int:
        """Required alignment of every page's first byte: the widest element stored in it."""
        if not self.packed:
            return 1
        whole = self.outer_scale or self.rope_scale
        return max(4 if whole else self.scale_bytes, 2 if self.rope_values == "bfloat16" else 1)

    def min_exponent(self, scale_floor: str) -> int:
        """No scale is stored below 2**min_exponent, by the rule of one of the published writers.

        "scale": scale ≥ 1e-4, rounded up to a power of two (FlashMLA's tests/quant.py).
        "amax": the largest magnitude counts as at least 1e-4 (vLLM, DeepSeek-V4's reference).
        With e4m3 scales the floor of both rules is the least e4m3 value, 2**-9.
        """
        if not self.packed:
            return 0  # no scales
        if self.scale == "e4m3":
            return -9
        if scale_floor == "scale":
            return -13
        _, greatest = VALUES[self.values]
        return int(power_of_two_exponent(np.array(1e-4), greatest, -126))

    def scatter(
        self, cache: np.ndarray, slots: np.ndarray, latent: np.ndarray, rope: np.ndarray, scale_floor: str = "scale"
    ) -> None:
        """Store latent [T, L] and rope [T, E] at `slots`, all in range, of `cache` (dense entries), in place."""
        page, offset = np.divmod(slots, cache.shape[1])
        if not self.packed:
            cache[page, offset] = np.concatenate([latent, rope], axis=1).astype(cache.dtype)
            return
        data, footer = self._sections(cache)
        quantized = np.concatenate([latent, rope], axis=1) if self.rope_values == "quantized" else latent
        tiles = quantized.reshape(len(slots), self.scales, self.tile)
        if self.outer_scale:
            outer = entry_scale(quantized, OUTER_GREATEST)
            data[page, offset, self.outer_scale : self.outer_scale + 4] = outer.view(np.uint8)
            tiles = tiles.astype(np.float32) / outer[..., None]
        if self.scale == "e4m3":
            values, scales = quantize_nvfp4(tiles, self.scale_up)
        else:
            values, scales = quantize(tiles, self.min_exponent(scale_floor), self.values)
        codes = values.view(np.uint8).reshape(len(slots), self.quantized)
        if self.values == "e2m1":
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        data[page, offset, : codes.shape[1]] = codes
        stored = {
            "float32": scales.view(np.uint8).reshape(len(slots), self.scales * 4),
            "ue8m0": scales.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8),
            "e4m3": scales.astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
        }[self.scale]
        if self.footer:
            footer[page, offset] = 0  # padding behind the scales, if there is any
            footer[page, offset, : self.scales] = stored
        else:
            data[page[:, None], offset[:, None], self.scale_offset + self._scale_places()] = stored
        if self.rope_values == "bfloat16":
            data[page, offset, self.rope_offset :] = rope.astype(ml_dtypes.bfloat16).view(np.uint8)
        elif self.rope_values == "e4m3":
            wide = rope.astype(np.float32)
            if self.rope_scale:
                scale = entry_scale(rope, 448)
                data[page, offset, self.rope_scale : self.rope_scale + 4] = scale.view(np.uint8)
                wide = wide / scale
            kept = np.clip(wide, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            data[page, offset, self.rope_offset : self.rope_offset + self.rope] = kept.view(np.uint8)

    def gather(self, cache: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Entries at `slots` [T], all in range, dequantised to float32 [T, L+E]; float64 rows stay float64.

        Exactly, but for products with scales of a whole entry.
        """
        page, offset = np.divmod(slots, cache.shape[1])
        if not self.packed:
            rows = cache[page, offset]
            return rows if rows.dtype == np.float64 else rows.astype(np.float32)
        sections = self._sections(cache)
        data, footer = sections[0][page, offset], sections[1][page, offset]
        codes = data[:, : self.quantized * self.value_bits // 8]
        scales = self._scales(data, footer)
        if self.values == "e2m1":
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(slots), self.quantized)
        values = np.ascontiguousarray(codes).view(VALUES[self.values][0]).astype(np.float32)
        tiled = values.reshape(len(slots), self.scales, self.tile) * scales[..., None]
        parts = [tiled.reshape(len(slots), self.quantized)]
        if self.rope_values in ("bfloat16", "e4m3"):
            kind = ml_dtypes.bfloat16 if self.rope_values == "bfloat16" else ml_dtypes.float8_e4m3fn
            nbytes = self.rope * np.dtype(kind).itemsize
            kept = np.ascontiguousarray(data[:, self.rope_offset : self.rope_offset + nbytes])
            dims = kept.view(kind).astype(np.float32)
            parts.append(dims * _floats(data, self.rope_scale) if self.rope_scale else dims)
        return np.concatenate(parts, axis=1)

    def copy(self, source: np.ndarray, source_slots: np.ndarray, cache: np.ndarray, slots: np.ndarray) -> None:
        """The bytes of entries at `source_slots` of one cache at `slots` of another, all in range, in place."""
        pairs = [(source, cache)]
        if self.packed:
            pairs = [*zip(self._sections(source), self._sections(cache), strict=True)]
        for ours, theirs in pairs:
            page, offset = np.divmod(slots, cache.shape[1])
            theirs[page, offset] = ours[np.divmod(source_slots, source.shape[1])]

    def used_scales(self, cache: np.ndarray) -> np.ndarray:
        """Scales [entries, scales] of the written entries: not all bytes of data are equal."""
        data, footer = self._sections(cache)
        return self._scales(data, footer)[(data != data[..., :1]).any(axis=-1)]

    def _sections(self, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views in bytes of the data [P, R, data] and the footers [P, R, footer] of all pages."""
        pages, entries, row = cache.shape
        flat = cache.view(np.uint8).reshape(pages, entries * row, copy=False)
        split = entries * self.data
        data = flat[:, :split].reshape(pages, entries, self.data, copy=False)
        return data, flat[:, split:].reshape(pages, entries, self.footer, copy=False)

    def _scales(self, data: np.ndarray, footer: np.ndarray) -> np.ndarray:
        """Scales [..., scales] float32 of entries, from the bytes of their data and footers."""
        stored = footer[..., : self.scales] if self.footer else data[..., self.scale_offset + self._scale_places()]
        kinds = {"float32": np.float32, "ue8m0": ml_dtypes.float8_e8m0fnu, "e4m3": ml_dtypes.float8_e4m3fn}
        scales = np.ascontiguousarray(stored).view(kinds[self.scale]).astype(np.float32)
        return scales * _floats(data, self.outer_scale) if self.outer_scale else scales

    def _scale_places(self) -> np.ndarray:
        """Offsets of the bytes of the scales, relative to the first scale."""
        place = np.arange(self.scales)
        if self.interleaved:
            place = 8 * (place % 4) + place // 4
        return (place[:, None] * self.scale_bytes + np.arange(self.scale_bytes)).reshape(-1)


# The largest value that e2m1 times an e4m3 scale reaches.
OUTER_GREATEST = 6 * 448
# No scale of a whole entry is smaller, so that no quotient by one is below the normal numbers.
LEAST_ENTRY_SCALE = 2.0**-100


def entry_scale(values: np.ndarray, greatest: int) -> np.ndarray:
    """max|x| / greatest of each row [T, dims] as float32 [T, 1], at least LEAST_ENTRY_SCALE; NaN is ignored."""
    amax = np.nanmax(np.abs(values.astype(np.float32)), axis=-1, keepdims=True, initial=0.0)
    amax = np.minimum(amax, np.finfo(np.float32).max)
    return np.maximum(amax / np.float32(greatest), np.float32(LEAST_ENTRY_SCALE))


def _floats(data: np.ndarray, first: int) -> np.ndarray:
    """The float32 at this byte of entries [..., data], as [..., 1]."""
    return np.ascontiguousarray(data[..., first : first + 4]).view(np.float32)


# DeepSeek-V3.2 ("fp8_ds_mla"; FlashMLA README): 512 e4m3, 4 float32 scales, 64 bf16 roped dims.
V32 = MlaLayout("v32", 656, rope_offset=528)
# GLM, V3.2's row without roped dims (FlashInfer): 512 e4m3, 4 float32 scales.
NOPE = MlaLayout("nope", 528, rope=0, rope_values="none")
# vLLM's nvfp4_ds_mla: 256 bytes e2m1, 64 e4m3 roped dims, 32 e4m3 scales.
NVFP4 = MlaLayout(
    "nvfp4", 352, values="e2m1", tile=16, scale="e4m3", scale_up=True, scale_offset=320, interleaved=True,
    rope_values="e4m3", rope_offset=256,
)  # fmt: skip
# The dtype of that name in local-inference-lab's vLLM (its pull request 82; b12x, attention/_shared/mla/kv_cache.py):
# 256 bytes e2m1, 32 e4m3 scales, 16 of padding, 64 bf16 roped dims. Its scales of a layer stay outside of the cache.
NVFP4_BF16 = MlaLayout("nvfp4_bf16", 432, values="e2m1", tile=16, scale="e4m3", scale_offset=256, rope_offset=304)
# The same with 64 e4m3 roped dims and, in the padding, their float32 scale (its pull request 95; b12x, its pull
# request 37). A second form has a float32 scale of all latent dims behind that one (b12x, its pull request 86).
NVFP4_FP8 = MlaLayout(
    "nvfp4_fp8", 368, values="e2m1", tile=16, scale="e4m3", scale_offset=256, rope_values="e4m3", rope_offset=304,
    rope_scale=288,
)  # fmt: skip
NVFP4_SCALED = replace(NVFP4_FP8, name="nvfp4_scaled", outer_scale=292)
# GLM-5.3-Flash in both (vLLM's pull request 549, b12x's 309): that second form without roped dims, and 8 of padding.
NVFP4_NOPE = MlaLayout(
    "nvfp4_nope", 304, rope=0, values="e2m1", tile=16, scale="e4m3", scale_offset=256, outer_scale=292,
    rope_values="none",
)  # fmt: skip
# DeepSeek-V4's entries in 4 bits (FlashInfer 0.7.2, sparse_mla_sm120/model/dsv4_nvfp4_layout.cuh): data of 224 bytes
# e2m1 and 64 bf16 roped dims; 28 e4m3 scales and a pad of 4 bytes.
V4_NVFP4 = MlaLayout(
    "v4_nvfp4", 384, latent=448, rope_in_value=True, values="e2m1", tile=16, scale="e4m3", footer=32, rope_offset=224
)
# DeepSeek-V4's entries in MXFP4 (SGLang's pull requests 32741 and 37138): 224 bytes e2m1, 14 UE8M0 scales and a pad of
# 2 bytes, 64 bf16 roped dims. Their writer rounds a scale's exponent to nearest, so that a largest value may saturate.
V4_MXFP4 = MlaLayout(
    "v4_mxfp4", 368, latent=448, rope_in_value=True, values="e2m1", tile=32, scale="ue8m0", scale_offset=224,
    rope_offset=240,
)  # fmt: skip
# DeepSeek-V4 (FlashMLA tests/quant.py "MODEL1"): data of 448 e4m3 and 64 bf16 roped dims; 7 UE8M0 scales and a pad.
V4 = MlaLayout(
    "v4", 584, latent=448, rope_in_value=True, tile=64, scale="ue8m0", footer=8, rope_offset=448, page_multiple=576
)
# DeepSeek-V4.1 (FlashMLA of 2026-09-30, README and tests/quant.py): no footer; an entry's scales follow its values,
# which include the roped dims. Bytes 0–511: 512 e4m3; 512–527: 16 UE8M0 scales, of 32 dims each.
V41 = MlaLayout(
    "v41", 528, latent=448, rope_in_value=True, tile=32, scale="ue8m0", scale_offset=512, rope_values="quantized"
)
# Its compressed entries (same source): bytes 0–255: 512 e2m1, the even dim in the low nibble; 256–287: 32 e4m3 scales,
# of 16 dims each. FlashMLA and vLLM use it only for these, beside a window of "v41"; here any cache may have it.
V41_FP4 = MlaLayout(
    "v41_fp4", 288, latent=448, rope_in_value=True, values="e2m1", tile=16, scale="e4m3", scale_offset=256,
    rope_values="quantized",
)  # fmt: skip
# The same two before that release (FlashMLA of 2026-09-10; vLLM's and SGLang's first V4.1): a page's scales are in its
# footer. Rows have the same number of bytes, so FlashMLA does not refuse such a cache: it misreads it.
V41_FOOTER = MlaLayout(
    "v41_footer", 528, latent=448, rope_in_value=True, tile=32, scale="ue8m0", footer=16, rope_values="quantized",
    page_multiple=512,
)  # fmt: skip
V41_FP4_FOOTER = MlaLayout(
    "v41_fp4_footer", 288, latent=448, rope_in_value=True, values="e2m1", tile=16, scale="e4m3", footer=32,
    rope_values="quantized", page_multiple=256,
)  # fmt: skip
# Rows of bfloat16 or float16 with the dims of attention's queries, of V3.2 and of V4.
PLAIN = MlaLayout("plain", 576, values="plain", rope_values="plain")
PLAIN_V4 = MlaLayout(
    "plain_v4", 512, latent=448, rope_in_value=True, values="plain", rope_values="plain", rope_offset=448
)
MLA_LAYOUTS = (
    V32, V4, V41, V41_FP4, V41_FOOTER, V41_FP4_FOOTER, NOPE, NVFP4, NVFP4_BF16, NVFP4_FP8, NVFP4_SCALED,
    NVFP4_NOPE, V4_NVFP4, V4_MXFP4, PLAIN, PLAIN_V4,
)  # fmt: skip

# Dims of an entry as a value, in every layout: its first ones. The dims of attention's output.
VALUE_DIMS = 512
# Dims of an entry as a key, in some layout. The dims of attention's queries.
KEY_DIMS = tuple(sorted({layout.dims for layout in MLA_LAYOUTS}))
SCALE_FLOORS = ("scale", "amax")


def mla_layouts(spec: Spec, name: str | None = None) -> tuple[MlaLayout, ...]:
    """The layouts that a cache [P, R, ROW] of this row and dtype can have, restricted to `name` if given."""
    packed = spec.itemsize == 1
    fitting = (layout for layout in MLA_LAYOUTS if (layout.row, layout.packed) == (spec.shape[-1], packed))
    return tuple(layout for layout in fitting if name in (None, layout.name))
