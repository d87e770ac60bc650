"""Byte layouts of the paged caches: the only place that knows an offset.

An entry's slot is `page * R + offset`. Page strides are free; within a page every layout is dense.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from xmla.core.plan import cdiv
from xmla.core.spec import DTYPES, Spec

if TYPE_CHECKING:
    from xmla.core.op import Problem

# Element types of quantised values: the NumPy dtype and the largest magnitude.
VALUES: dict[str, tuple[Any, float]] = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}


def power_of_two_exponent(amax: np.ndarray, greatest: float, min_exponent: int) -> np.ndarray:
    """Smallest integer e ≥ min_exponent with greatest · 2**e ≥ amax, exactly: adding e to a float's exponent adds
    e · 2**23 to its bits, so e is the difference of the bits, divided and rounded up."""
    difference = amax.astype(np.float32).view(np.int32) - np.float32(greatest).view(np.int32)
    return np.maximum(-(-difference >> 23), min_exponent)


def quantize(values: np.ndarray, min_exponent: int, kind: str = "e4m3") -> tuple[np.ndarray, np.ndarray]:
    """e4m3 or e2m1 values and float32 power-of-two scales of `values` [..., dims], one scale over the last axis.

    q = round_to_nearest_even(clamp(x / s, ±greatest)), s = 2**e. NaN does not count towards the scale; it stays NaN in
    e4m3, and makes the scale NaN with e2m1, which has none.
    """
    dtype, greatest = VALUES[kind]
    wide = values.astype(np.float32)
    amax = np.nanmax(np.abs(wide), axis=-1, initial=0.0)
    exponent = power_of_two_exponent(amax, greatest, min_exponent)
    scale = np.ldexp(np.float32(1), exponent)
    scaled = np.clip(np.ldexp(wide, -exponent[..., None]), -greatest, greatest)
    if kind == "e2m1":
        broken = np.isnan(wide)
        scale = np.where(broken.any(axis=-1), np.float32(np.nan), scale)
        scaled = np.where(broken, np.float32(greatest), scaled)  # as the conversion instruction has it
    return scaled.astype(dtype), scale


def quantize_nvfp4(values: np.ndarray, scale_up: bool) -> tuple[np.ndarray, np.ndarray]:
    """e2m1 values and float32 scales that e4m3 holds of `values` [..., dims], one scale over the last axis.

    s = e4m3(clamp(max|x| / 6, 2**-9, 448)): the nearest, of which the largest value may saturate, or if `scale_up` the
    next above. q = round_to_nearest_even(clamp(x / s, ±6)). Quotients are float32's. NaN makes the scale NaN and is
    itself stored as 6.
    """
    wide = values.astype(np.float32)
    amax = np.nanmax(np.abs(wide), axis=-1, initial=0.0)
    exact = np.clip(amax / np.float32(6), np.float32(2**-9), np.float32(448))
    stored = exact.astype(ml_dtypes.float8_e4m3fn)
    if scale_up:
        stored = (stored.view(np.uint8) + (stored.astype(np.float32) < exact)).astype(np.uint8).view(stored.dtype)
    scale = stored.astype(np.float32)
    broken = np.isnan(wide)
    scaled = np.where(broken, np.float32(6), np.clip(wide / scale[..., None], -6, 6))
    return scaled.astype(ml_dtypes.float4_e2m1fn), np.where(broken.any(axis=-1), np.float32(np.nan), scale)


@dataclass(frozen=True, slots=True)
class MlaLayout:
    """Entries of a latent cache [P, R, ROW]: `latent` dims and then `rope` dims, in bytes or as plain rows.

    A page holds the data of its R entries and then, where there is a footer, their scales; without one the scales
    stand inside each entry. Kernels take a layout as one constexpr.

    Attributes:
        row: The last axis of the cache: bytes an entry takes, or elements of a plain row.
        latent: Dims before the roped ones.
        rope: Roped dims.
        rope_in_value: Attention's values are all dims (one vector is key and value), else the latent ones.
        values: Element type of the latent dims: "e4m3", "e2m1" (two a byte, the even dim in the low nibble) or "plain".
        tile: Dims that share a scale.
        scale: Type of a scale: "float32", "ue8m0" (a byte e stands for 2**(e − 127)) or "e4m3".
        scale_up: An e4m3 scale is the next above max|x| / 6 instead of the nearest (`quantize_nvfp4`).
        scale_offset: First byte of an entry's scales within it; of no meaning with a footer.
        interleaved: Scale g stands at place 8 · (g mod 4) + g div 4 instead of g.
        footer: Bytes an entry has in the page's footer.
        rope_values: Element type of the roped dims: "bfloat16", "e4m3" without a scale, "plain", "quantized" as the
            latent ones, whose tiles they continue, or "none".
        rope_offset: First byte, or element of a plain row, of the roped dims.
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
    rope_values: str = "bfloat16"
    rope_offset: int = 512
    page_multiple: int = 1

    @property
    def packed(self) -> bool:
        """Bytes, not plain rows."""
        return self.values != "plain"

    @property
    def dims(self) -> int:
        """Dims of an entry as a key."""
        return self.latent + self.rope

    @property
    def tail(self) -> int:
        """Dims that only keys have: the roped ones where values do not hold them."""
        return 0 if self.rope_in_value else self.rope

    @property
    def data(self) -> int:
        """Distance of neighbouring entries' data within a page."""
        return self.row - self.footer

    def page_stride(self, entries: int) -> int:
        """Elements from page to page as allocators of the format have them."""
        return cdiv(entries * self.row, self.page_multiple) * self.page_multiple

    @property
    def value_bits(self) -> int:
        return 4 if self.values == "e2m1" else 8

    @property
    def quantized(self) -> int:
        """Dims that have a scale: the first ones."""
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
        """What every page's first byte is a multiple of: the widest element stored in it."""
        return max(self.scale_bytes, 2 if self.rope_values == "bfloat16" else 1) if self.packed else 1

    def min_exponent(self, scale_floor: str) -> int:
        """No scale is stored below 2**min_exponent, by the rule of one of the published writers.

        "scale": scale ≥ 1e-4, rounded up to a power of two (FlashMLA's tests/quant.py).
        "amax": the largest magnitude counts as 1e-4 at least (vLLM, DeepSeek-V4's reference).
        With e4m3 scales both have the least that e4m3 holds, 2**-9.
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
        """Store latent [T, L] and rope [T, E] at `slots`, each in range, of `cache` (dense entries), in place."""
        page, offset = np.divmod(slots, cache.shape[1])
        if not self.packed:
            cache[page, offset] = np.concatenate([latent, rope], axis=1).astype(cache.dtype)
            return
        data, footer = self._sections(cache)
        quantized = np.concatenate([latent, rope], axis=1) if self.rope_values == "quantized" else latent
        tiles = quantized.reshape(len(slots), self.scales, self.tile)
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
            kept = np.clip(rope.astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
            data[page, offset, self.rope_offset : self.rope_offset + self.rope] = kept.view(np.uint8)

    def gather(self, cache: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Entries at `slots` [T], each in range, as float32 [T, L+E]: exactly what they stand for."""
        page, offset = np.divmod(slots, cache.shape[1])
        if not self.packed:
            return cache[page, offset].astype(np.float32)
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
            parts.append(kept.view(kind).astype(np.float32))
        return np.concatenate(parts, axis=1)

    def used_scales(self, cache: np.ndarray) -> np.ndarray:
        """Scales [entries, scales] of the entries that hold something: data of more than one byte value."""
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
        """Scales [..., scales] float32 of entries of which these are the data and the footers, in bytes."""
        stored = footer[..., : self.scales] if self.footer else data[..., self.scale_offset + self._scale_places()]
        kinds = {"float32": np.float32, "ue8m0": ml_dtypes.float8_e8m0fnu, "e4m3": ml_dtypes.float8_e4m3fn}
        return np.ascontiguousarray(stored).view(kinds[self.scale]).astype(np.float32)

    def _scale_places(self) -> np.ndarray:
        """Where the bytes of the scales stand, from the first scale on."""
        place = np.arange(self.scales)
        if self.interleaved:
            place = 8 * (place % 4) + place // 4
        return (place[:, None] * self.scale_bytes + np.arange(self.scale_bytes)).reshape(-1)


# DeepSeek-V3.2 ("fp8_ds_mla"; FlashMLA README): 512 e4m3, 4 float32 scales, 64 bf16 roped dims.
V32 = MlaLayout("v32", 656, rope_offset=528)
# GLM, V3.2's row without roped dims (FlashInfer): 512 e4m3, 4 float32 scales.
NOPE = MlaLayout("nope", 528, rope=0, rope_values="none")
# vLLM's nvfp4_ds_mla: 256 bytes e2m1, 64 e4m3 roped dims, 32 e4m3 scales.
NVFP4 = MlaLayout(
    "nvfp4", 352, values="e2m1", tile=16, scale="e4m3", scale_up=True, scale_offset=320, interleaved=True,
    rope_values="e4m3", rope_offset=256,
)  # fmt: skip
# DeepSeek-V4 (FlashMLA tests/quant.py "MODEL1"): data of 448 e4m3 and 64 bf16 roped dims; 7 UE8M0 scales and a pad.
V4 = MlaLayout(
    "v4", 584, latent=448, rope_in_value=True, tile=64, scale="ue8m0", footer=8, rope_offset=448, page_multiple=576
)
# DeepSeek-V4.1 (FlashMLA of 2026-09-30, README and tests/quant.py): entries one after the other, each with its scales
# behind its values, the roped dims among them. Bytes 0–511: 512 e4m3; 512–527: 16 UE8M0 scales, of 32 dims each.
V41 = MlaLayout(
    "v41", 528, latent=448, rope_in_value=True, tile=32, scale="ue8m0", scale_offset=512, rope_values="quantized"
)
# Its compressed entries (same source): bytes 0–255: 512 e2m1, the even dim in the low nibble; 256–287: 32 e4m3 scales,
# of 16 dims each. FlashMLA and vLLM have it for these alone, beside a window of "v41"; here any cache may be in it.
V41_FP4 = MlaLayout(
    "v41_fp4", 288, latent=448, rope_in_value=True, values="e2m1", tile=16, scale="e4m3", scale_offset=256,
    rope_values="quantized",
)  # fmt: skip
# The same two before that release (FlashMLA of 2026-09-10; vLLM's and SGLang's first V4.1): a page's scales stand in
# its footer. A row has as many bytes, so FlashMLA does not refuse such a cache: it misreads it.
V41_FOOTER = MlaLayout(
    "v41_footer", 528, latent=448, rope_in_value=True, tile=32, scale="ue8m0", footer=16, rope_values="quantized",
    page_multiple=512,
)  # fmt: skip
V41_FP4_FOOTER = MlaLayout(
    "v41_fp4_footer", 288, latent=448, rope_in_value=True, values="e2m1", tile=16, scale="e4m3", footer=32,
    rope_values="quantized", page_multiple=256,
)  # fmt: skip
# Rows of bfloat16 or float16 as attention's queries have them, of V3.2 and of V4.
PLAIN = MlaLayout("plain", 576, values="plain", rope_values="plain")
PLAIN_V4 = MlaLayout(
    "plain_v4", 512, latent=448, rope_in_value=True, values="plain", rope_values="plain", rope_offset=448
)
MLA_LAYOUTS = (V32, V4, V41, V41_FP4, V41_FOOTER, V41_FP4_FOOTER, NOPE, NVFP4, PLAIN, PLAIN_V4)

# Dims of an entry as a value, its first ones, in every layout; with them the dims of attention's output.
VALUE_DIMS = 512
SCALE_FLOORS = ("scale", "amax")


def mla_layouts(spec: Spec, name: str | None = None) -> tuple[MlaLayout, ...]:
    """The layouts that a cache [P, R, ROW] of this row and dtype can have, only the one called `name` if given."""
    packed = spec.itemsize == 1
    fitting = (known for known in MLA_LAYOUTS if (known.row, known.packed) == (spec.shape[-1], packed))
    return tuple(layout for layout in fitting if name in (None, layout.name))


def mla_layout(problem: "Problem", cache: str = "cache") -> MlaLayout:
    """The layout of the argument `cache`, whose format the attribute `<cache>_format` may name.

    Raises:
        ArgumentError: No layout has such rows, or several have and none is named; a stride, address or name is wrong.
    """
    spec, attribute = problem.specs[cache], f"{cache}_format"
    name = problem.attrs[attribute]
    if name is not None and name not in [known.name for known in MLA_LAYOUTS]:
        problem.refuse(attribute, "value", repr(name), "one of " + ", ".join(known.name for known in MLA_LAYOUTS))
    known = [layout for layout in MLA_LAYOUTS if name in (None, layout.name)]
    fitting = mla_layouts(spec, name)
    if not fitting:
        rows = (f"{k.row} {'bytes' if k.packed else 'elements'} ({k.name})" for k in known)
        problem.refuse(cache, f"axis ROW (axis 2) of {spec.dtype}", spec.shape[2], " or ".join(rows))
    if len(fitting) > 1:
        problem.refuse(attribute, "value", None, " or ".join(repr(layout.name) for layout in fitting))
    (layout,) = fitting
    problem.require_pages(cache, layout.alignment)
    return layout


INDEXER_DIMS = (32, 64, 128)
INDEXER_FORMATS = ("fp8", "mxfp4")
MXFP4_BLOCK = 32  # dims that share a scale
NAN_SCALE = 255  # the UE8M0 byte that makes its block NaN


def quantize_mxfp4(values: np.ndarray, min_exponent: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed e2m1 [..., D/2] uint8 and UE8M0 bytes [..., D/32] of `values` [..., D]: a power of two a block of 32.

    q = round_to_nearest_even(clamp(x / 2**e, ±6)), e the smallest ≥ min_exponent with 6 · 2**e ≥ max|x|. The even
    dim is in the low nibble. −0, and what rounds to it, keeps its sign, as by `cvt.rn.satfinite.e2m1x2`. e2m1 has no
    NaN: the block of a NaN gets the scale 255, which makes all of it NaN; NaN itself is stored as +6, as by that
    instruction.
    """
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // MXFP4_BLOCK, MXFP4_BLOCK)
    rounded, factors = quantize(blocks, min_exponent, kind="e2m1")
    codes = rounded.view(np.uint8).reshape(values.shape)
    scales = np.where(np.isnan(factors), NAN_SCALE, np.frexp(factors)[1] + 126)
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8), scales.astype(np.uint8)


def dequantize_mxfp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [..., D] of packed e2m1 [..., D/2] and UE8M0 bytes [..., D/32]."""
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*scales.shape, MXFP4_BLOCK)
    factors = np.where(scales == NAN_SCALE, np.nan, np.ldexp(1.0, scales.astype(np.int32) - 127))
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64) * factors[..., None]
    return values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@dataclass(frozen=True, slots=True)
class IndexerLayout:
    """Pages of indexer keys: R rows of values, then R entries of 4 bytes with their scales.

    The tensor's last axis is the sum of both, but an entry's scales are not beside its values: they stand in the
    page's footer (DeepGEMM, vLLM, SGLang).

    | format | values of an entry | 4 bytes of scales |
    |---|---|---|
    | fp8 | D e4m3 | one float32 |
    | mxfp4 | D/2 bytes, two e2m1 each, the even dim in the low nibble | a UE8M0 byte a block of 32 dims, rest 127 |

    DeepGEMM passes an entry's scales as one int32 whatever D is: hence 4 bytes for 32 and 64 dims too.
    """

    dim: int
    format: str = "fp8"

    @property
    def name(self) -> str:
        return f"indexer_{self.format}_d{self.dim}"

    @property
    def packed(self) -> bool:
        """Bytes, as every format of indexer keys."""
        return True

    @property
    def value_bytes(self) -> int:
        return self.dim if self.format == "fp8" else self.dim // 2

    @property
    def row(self) -> int:
        return self.value_bytes + 4

    @property
    def query_dtype(self) -> str:
        """Of the quantised queries that such keys are multiplied with."""
        return "float8_e4m3fn" if self.format == "fp8" else "bfloat16"

    def page_stride(self, entries: int) -> int:
        """Bytes from page to page as allocators have them."""
        return entries * self.row

    @property
    def min_exponent(self) -> int:
        """Writers never store a scale below 2**min_exponent.

        fp8: 2**ceil(log2(1e-4 / 448)), DeepSeek's reference floors amax at 1e-4. mxfp4: amax at 6 · 2**-126, as vLLM.
        """
        return -22 if self.format == "fp8" else -126

    @property
    def dtypes(self) -> tuple[str, str]:
        """Of an entry's values and of its scales, apart from their page."""
        return ("float8_e4m3fn", "float32") if self.format == "fp8" else ("uint8", "int32")

    def quantize(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is stored of keys [..., D]: values [..., value_bytes] and scales [...], of `dtypes`."""
        if self.format == "fp8":
            return quantize(keys, self.min_exponent)
        packed, used = quantize_mxfp4(keys, self.min_exponent)
        scales = np.full((*keys.shape[:-1], 4), 127, np.uint8)
        scales[..., : used.shape[-1]] = used
        return packed, scales.view(np.int32)[..., 0]

    def operands(self, values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64 keys [..., D] of the dot product, and the factors [...] of the logits that it gives."""
        if self.format == "fp8":
            return values.astype(np.float64), scales.astype(np.float64)
        used = np.ascontiguousarray(scales)[..., None].view(np.uint8)[..., : self.dim // MXFP4_BLOCK]
        return dequantize_mxfp4(values.view(np.uint8), used), np.ones(scales.shape)

    def gather(self, cache: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values [..., value_bytes] and scales [...] of `slots`, each of which is in range."""
        values, scales = self._sections(cache)
        page, offset = np.divmod(slots, cache.shape[1])
        return values[page, offset], scales[page, offset]

    def scatter(self, cache: np.ndarray, slots: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
        """Store values [T, value_bytes] and scales [T] at `slots` of `cache` [P, R, ROW] (dense pages), in place."""
        all_values, all_scales = self._sections(cache)
        page, offset = np.divmod(slots, cache.shape[1])
        all_values[page, offset] = values
        all_scales[page, offset] = scales

    def used_scales(self, cache: np.ndarray) -> np.ndarray:
        """Scales [entries, 1], or [entries, 4] of blocks, of the entries with values of more than one byte value."""
        values, footer = self._sections(cache)
        scales = footer[(values.view(np.uint8) != values.view(np.uint8)[..., :1]).any(axis=-1)][:, None]
        if self.format == "fp8":
            return scales
        return np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)

    def _sections(self, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of the values [P, R, value_bytes] and the scales [P, R] of all pages."""
        pages, entries, row = cache.shape
        kinds = [DTYPES[name][0] for name in self.dtypes]
        flat = cache.view(np.uint8).reshape(pages, entries * row, copy=False)
        values = flat[:, : entries * self.value_bytes].view(kinds[0])
        footer = flat[:, entries * self.value_bytes :].view(kinds[1])
        return values.reshape(pages, entries, self.value_bytes, copy=False), footer


INDEXER_LAYOUTS = tuple(IndexerLayout(dim, form) for dim in INDEXER_DIMS for form in INDEXER_FORMATS)


def indexer_layouts(row: int, dim: int | None = None, form: str | None = None) -> list[IndexerLayout]:
    """Every layout with rows of `row` bytes, of keys of `dim` dims and of a format if those are known."""
    return [known for known in INDEXER_LAYOUTS
            if known.row == row and dim in (None, known.dim) and form in (None, known.format)]  # fmt: skip


def indexer_rows(dim: int) -> str:
    """The rows, in bytes, that a cache of keys of `dim` dims can have, in the words of an error."""
    fp8, mxfp4 = (IndexerLayout(dim, form).row for form in INDEXER_FORMATS)
    return f"{fp8} (fp8: D + 4) or {mxfp4} (mxfp4: D/2 + 4)"


def indexer_pairs(
    source_row: int, row: int, source_format: str | None, cache_format: str | None
) -> list[tuple[IndexerLayout, IndexerLayout]]:
    """The layouts of the same dims that two caches with such rows can have."""
    origins = indexer_layouts(source_row, form=source_format)
    return [(origin, layout) for origin in origins for layout in indexer_layouts(row, origin.dim, cache_format)]
