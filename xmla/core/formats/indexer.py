"""Formats of the indexer's cache: the place of every byte of a key."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from xmla.core.errors import ArgumentError
from xmla.core.formats.numbers import MXFP4_BLOCK, dequantize_mxfp4, quantize, quantize_mxfp4
from xmla.core.values import DTYPES

INDEXER_DIMS = (32, 64, 128)
INDEXER_FORMATS = ("fp8", "mxfp4")


@dataclass(frozen=True, slots=True)
class IndexerLayout:
    """Pages of indexer keys: R rows of values, then R entries of 4 bytes with their scales.

    The tensor's last axis is the sum of both, but an entry's scales are not beside its values: they are in the page's
    footer (DeepGEMM, vLLM, SGLang).

    | format | values of an entry | 4 bytes of scales |
    |---|---|---|
    | fp8 | D e4m3 | one float32 |
    | mxfp4 | D/2 bytes, two e2m1 each, the even dim in the low nibble | one UE8M0 byte per block of 32 dims, rest 127 |

    DeepGEMM passes an entry's scales as one int32 for every D, so 32 and 64 dims have 4 bytes too.
    """

    dim: int
    format: str = "fp8"

    def __post_init__(self) -> None:
        if self.format not in INDEXER_FORMATS:
            expected = " or ".join(map(repr, INDEXER_FORMATS))
            raise ArgumentError(f"indexer's cache: format is {self.format!r}, expected {expected}")

    @property
    def name(self) -> str:
        return f"indexer_{self.format}_d{self.dim}"

    @property
    def packed(self) -> bool:
        """Whether rows are bytes: true of every format of indexer keys."""
        return True

    @property
    def value_bytes(self) -> int:
        return self.dim if self.format == "fp8" else self.dim // 2

    @property
    def row(self) -> int:
        return self.value_bytes + 4

    @property
    def query_dtype(self) -> str:
        """Dtype of the quantised queries that are multiplied with such keys."""
        return "float8_e4m3fn" if self.format == "fp8" else "bfloat16"

    def page_stride(self, entries: int) -> int:
        """Bytes from page to page in the format's allocators."""
        return entries * self.row

    @property
    def min_exponent(self) -> int:
        """Writers never store a scale below 2**min_exponent.

        fp8: 2**ceil(log2(1e-4 / 448)), DeepSeek's reference floors amax at 1e-4. mxfp4: amax at 6 · 2**-126, as vLLM.
        """
        return -22 if self.format == "fp8" else -126

    @property
    def dtypes(self) -> tuple[str, str]:
        """Dtypes of an entry's values and of its scales once they are read from their page."""
        return ("float8_e4m3fn", "float32") if self.format == "fp8" else ("uint8", "int32")

    def quantize(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Quantise keys [..., D]: the stored values [..., value_bytes] and scales [...], of `dtypes`."""
        if self.format == "fp8":
            return quantize(keys, self.min_exponent)
        packed, used = quantize_mxfp4(keys, self.min_exponent)
        scales = np.full((*keys.shape[:-1], 4), 127, np.uint8)
        scales[..., : used.shape[-1]] = used
        return packed, scales.view(np.int32)[..., 0]

    def operands(self, values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys of the dot product, float64 [..., D], and the factors [...] of the resulting logits."""
        if self.format == "fp8":
            return values.astype(np.float64), scales.astype(np.float64)
        used = np.ascontiguousarray(scales)[..., None].view(np.uint8)[..., : self.dim // MXFP4_BLOCK]
        return dequantize_mxfp4(values.view(np.uint8), used), np.ones(scales.shape)

    def gather(self, cache: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values [..., value_bytes] and scales [...] at `slots`, all in range."""
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
        """Scales [entries, 1], or [entries, 4] of blocks, of the written entries: not all bytes of values are equal."""
        scales = self._written(cache)[:, None]
        if self.format == "fp8":
            return scales
        return np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)

    def _written(self, cache: np.ndarray) -> np.ndarray:
        """Scales, as they are stored, of the written entries."""
        values, footer = self._sections(cache)
        return footer[(values.view(np.uint8) != values.view(np.uint8)[..., :1]).any(axis=-1)]

    def _sections(self, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of the values [P, R, value_bytes] and the scales [P, R] of all pages."""
        pages, entries, row = cache.shape
        kinds = [DTYPES[name][0] for name in self.dtypes]
        flat = cache.view(np.uint8).reshape(pages, entries * row, copy=False)
        values = flat[:, : entries * self.value_bytes].view(kinds[0])
        footer = flat[:, entries * self.value_bytes :].view(kinds[1])
        return values.reshape(pages, entries, self.value_bytes, copy=False), footer


@dataclass(frozen=True, slots=True)
class Ue8m0IndexerLayout(IndexerLayout):
    """fp8 keys whose one scale, a power of two, is stored as four equal UE8M0 bytes, in the place of the float32.

    vLLM 0.33 writes it on Blackwell (`mqa_logits_use_mx_scales` in its `utils/deep_gemm.py`). No op reads it:
    `xmla.layouts` tells it from float32 scales, and converts pools.
    """

    @property
    def name(self) -> str:
        return f"indexer_fp8_ue8m0_d{self.dim}"

    def used_scales(self, cache: np.ndarray) -> np.ndarray:
        """Scales [entries, 1] of the written entries, NaN where the four bytes differ."""
        stored = np.ascontiguousarray(self._written(cache))[:, None].view(np.uint8)
        equal = (stored == stored[:, :1]).all(axis=1, keepdims=True)
        return np.where(equal, stored[:, :1].copy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32), np.nan)


UE8M0_KEYS = Ue8m0IndexerLayout(128)
INDEXER_LAYOUTS = tuple(IndexerLayout(dim, form) for dim in INDEXER_DIMS for form in INDEXER_FORMATS)


def indexer_layouts(row: int, dim: int | None = None, form: str | None = None) -> list[IndexerLayout]:
    """Every layout with rows of `row` bytes, restricted to keys of `dim` dims and to format `form` if given."""
    return [layout for layout in INDEXER_LAYOUTS
            if layout.row == row and dim in (None, layout.dim) and form in (None, layout.format)]  # fmt: skip


def indexer_rows(dim: int) -> str:
    """The possible rows, in bytes, of a cache of keys of `dim` dims, worded for an error."""
    fp8, mxfp4 = (IndexerLayout(dim, form).row for form in INDEXER_FORMATS)
    return f"{fp8} (fp8: D + 4) or {mxfp4} (mxfp4: D/2 + 4)"


def indexer_pairs(
    source_row: int, row: int, source_format: str | None, cache_format: str | None
) -> list[tuple[IndexerLayout, IndexerLayout]]:
    """The pairs of layouts with the same dims that two caches with these rows and formats can have."""
    origins = indexer_layouts(source_row, form=source_format)
    return [(origin, layout) for origin in origins for layout in indexer_layouts(row, origin.dim, cache_format)]
