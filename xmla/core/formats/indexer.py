"""Formats of the indexer's cache: the place of every byte of a key."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from xmla.core.errors import ArgumentError
from xmla.core.formats.numbers import MXFP4_BLOCK, dequantize_mxfp4, quantize, quantize_mxfp4
from xmla.core.values import DTYPES

INDEXER_DIMS = (32, 64, 128)
INDEXER_FORMATS = ("fp8", "mxfp4", "fp8_ue8m0")
QUERY_FORMATS = ("fp8", "mxfp4")
UE8M0_DIMS = (128,)  # of fp8_ue8m0


@dataclass(frozen=True, slots=True)
class IndexerLayout:
    """Pages of indexer keys: R rows of values, then R entries of 4 bytes with their scales.

    The tensor's last axis is the sum of both, but an entry's scales are not beside its values: they are in the page's
    footer (DeepGEMM, vLLM, SGLang).

    | format | values of an entry | 4 bytes of scales |
    |---|---|---|
    | fp8 | D e4m3 | one float32 |
    | mxfp4 | D/2 bytes, two e2m1 each, the even dim in the low nibble | one UE8M0 byte per block of 32 dims, rest 127 |
    | fp8_ue8m0 | D e4m3 | the key's one scale, a power of two, as four equal UE8M0 bytes |

    The last is vLLM's on Blackwell since 0.33 (`pack_ue8m0_x4` in its v1/attention/ops/common.py), for products of
    MXFP8, which have a scale per 32 dims. Rows do not tell it from fp8: a call names it.

    DeepGEMM passes an entry's scales as one int32 for every D, so 32 and 64 dims have 4 bytes too.
    """

    dim: int
    format: str = "fp8"

    def __post_init__(self) -> None:
        if self.format not in INDEXER_FORMATS:
            expected = " or ".join(map(repr, INDEXER_FORMATS))
            raise ArgumentError(f"indexer's cache: format is {self.format!r}, expected {expected}")
        if self.format == "fp8_ue8m0" and self.dim not in UE8M0_DIMS:
            raise ArgumentError(f"indexer's cache: 'fp8_ue8m0' has keys of 128 dims, got {self.dim}")

    @property
    def name(self) -> str:
        return f"indexer_{self.format}_d{self.dim}"

    @property
    def packed(self) -> bool:
        """Whether rows are bytes: true of every format of indexer keys."""
        return True

    @property
    def inferred(self) -> bool:
        """Whether a cache whose rows fit has this format unless another is named."""
        return self.format != "fp8_ue8m0"

    @property
    def values(self) -> str:
        """Element type of the dims."""
        return "e2m1" if self.format == "mxfp4" else "e4m3"

    @property
    def scale(self) -> str:
        """Type of a scale."""
        return "float32" if self.format == "fp8" else "ue8m0"

    @property
    def value_bytes(self) -> int:
        return self.dim // 2 if self.format == "mxfp4" else self.dim

    @property
    def row(self) -> int:
        return self.value_bytes + 4

    @property
    def query_format(self) -> str:
        """The format of the queries that are multiplied with such keys (`quantize_indexer_query`)."""
        return "mxfp4" if self.format == "mxfp4" else "fp8"

    @property
    def query_dtype(self) -> str:
        """Dtype of these queries."""
        return "bfloat16" if self.format == "mxfp4" else "float8_e4m3fn"

    def page_stride(self, entries: int) -> int:
        """Bytes from page to page in the format's allocators."""
        return entries * self.row

    @property
    def min_exponent(self) -> int:
        """Writers never store a scale below 2**min_exponent.

        fp8: 2**ceil(log2(1e-4 / 448)), DeepSeek's reference floors amax at 1e-4. mxfp4: amax at 6 · 2**-126, as vLLM.
        """
        return -126 if self.format == "mxfp4" else -22

    @property
    def dtypes(self) -> tuple[str, str]:
        """Dtypes of an entry's values and of its scales once they are read from their page."""
        values = "uint8" if self.format == "mxfp4" else "float8_e4m3fn"
        return values, "float32" if self.scale == "float32" else "int32"

    def quantize(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Quantise keys [..., D]: the stored values [..., value_bytes] and scales [...], of `dtypes`."""
        if self.format != "mxfp4":
            values, scales = quantize(keys, self.min_exponent)
            return values, scales if self.format == "fp8" else ue8m0_words(scales)
        packed, used = quantize_mxfp4(keys, self.min_exponent)
        scales = np.full((*keys.shape[:-1], 4), 127, np.uint8)
        scales[..., : used.shape[-1]] = used
        return packed, scales.view(np.int32)[..., 0]

    def operands(self, values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The keys of the dot product, float64 [..., D], and the factors [...] of the resulting logits."""
        if self.format == "fp8":
            return values.astype(np.float64), scales.astype(np.float64)
        if self.format == "fp8_ue8m0":
            return values.astype(np.float64), of_ue8m0_words(scales)
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
        values, footer = self._sections(cache)
        scales = footer[(values.view(np.uint8) != values.view(np.uint8)[..., :1]).any(axis=-1)][:, None]
        if self.format == "fp8":
            return scales
        if self.format == "fp8_ue8m0":
            return of_ue8m0_words(scales)
        return np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)

    def _sections(self, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of the values [P, R, value_bytes] and the scales [P, R] of all pages."""
        pages, entries, row = cache.shape
        kinds = [DTYPES[name][0] for name in self.dtypes]
        flat = cache.view(np.uint8).reshape(pages, entries * row, copy=False)
        values = flat[:, : entries * self.value_bytes].view(kinds[0])
        footer = flat[:, entries * self.value_bytes :].view(kinds[1])
        return values.reshape(pages, entries, self.value_bytes, copy=False), footer


INDEXER_LAYOUTS = (
    *(IndexerLayout(dim, form) for dim in INDEXER_DIMS for form in ("fp8", "mxfp4")),
    *(IndexerLayout(dim, "fp8_ue8m0") for dim in UE8M0_DIMS),
)


def ue8m0_words(scales: np.ndarray) -> np.ndarray:
    """int32 of four equal UE8M0 bytes for each of `scales`, powers of two."""
    stored = scales.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    return np.repeat(stored[..., None], 4, axis=-1).view(np.int32)[..., 0]


def of_ue8m0_words(words: np.ndarray) -> np.ndarray:
    """float64 scales of such words, NaN where the four bytes differ."""
    stored = np.ascontiguousarray(words)[..., None].view(np.uint8)
    scales = stored.view(ml_dtypes.float8_e8m0fnu)[..., 0].astype(np.float64)
    return np.where((stored == stored[..., :1]).all(axis=-1), scales, np.nan)


def indexer_layouts(row: int, dim: int | None = None, form: str | None = None) -> list[IndexerLayout]:
    """Every layout with rows of `row` bytes, of keys of `dim` dims if given, and of `form`, or one that is inferred."""
    return [layout for layout in INDEXER_LAYOUTS if layout.row == row and dim in (None, layout.dim)
            and (layout.inferred if form is None else layout.format == form)]  # fmt: skip


def indexer_rows(dim: int | None = None, form: str | None = None) -> str:
    """The rows, in bytes, of caches of keys of `dim` dims if given, and of `form` or those that are inferred.

    Worded for an error; empty if there are none.
    """
    options = []
    for each in INDEXER_FORMATS:
        layouts = [layout for layout in INDEXER_LAYOUTS if layout.format == each and dim in (None, layout.dim)]
        if layouts and (layouts[0].inferred if form is None else each == form):
            *rows, last = (str(layout.row) for layout in layouts)
            rows = " or ".join([", ".join(rows), last] if rows else [last])
            options.append(f"{rows} ({each}: {'D/2' if each == 'mxfp4' else 'D'} + 4)")
    return " or ".join(options)


def indexer_pairs(
    source_row: int, row: int, source_format: str | None, cache_format: str | None
) -> list[tuple[IndexerLayout, IndexerLayout]]:
    """The pairs of layouts with the same dims that two caches with these rows and formats can have."""
    origins = indexer_layouts(source_row, form=source_format)
    return [(origin, layout) for origin in origins for layout in indexer_layouts(row, origin.dim, cache_format)]
