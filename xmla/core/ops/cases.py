"""Inputs for the named cases of the ops: memory that must not be read is poisoned, pages are shuffled and strided."""

import ml_dtypes
import numpy as np

from xmla.core.formats.indexer import IndexerLayout, ue8m0_words
from xmla.core.formats.mla import MlaLayout
from xmla.core.formats.numbers import MXFP4_BLOCK

BF16 = np.dtype(ml_dtypes.bfloat16)
POISON = 0xFF  # NaN in every floating dtype


def normal(rng: np.random.Generator, *shape: int, dtype: np.dtype = BF16, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype)


def empty_pages(pages: int, entries: int, row: int, dtype: np.dtype, padding: int = 0) -> np.ndarray:
    """A poisoned pool [pages, entries, row] whose page stride is `padding` elements over dense."""
    size = entries * row
    pool = np.full((pages, (size + padding) * dtype.itemsize), POISON, np.uint8).view(dtype)
    return pool[:, :size].reshape(pages, entries, row, copy=False)


def mla_pool(
    rng: np.random.Generator, layout: MlaLayout, pages: int, entries: int, used: np.ndarray, padding: int = 0,
    dtype: np.dtype = BF16,
) -> np.ndarray:  # fmt: skip
    """A latent cache, of `dtype` if its rows are plain, in which only the slots `used` hold keys; the rest is NaN."""
    pool = empty_pages(pages, entries, layout.row, np.dtype(np.uint8) if layout.packed else dtype, padding)
    used = np.unique(used)
    layout.scatter(pool, used, normal(rng, len(used), layout.latent), normal(rng, len(used), layout.rope))
    return pool


def indexer_keys(rng: np.random.Generator, layout: IndexerLayout, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of `count` random keys as the layout stores them; the scales are independent of the values."""
    if layout.values == "e4m3":
        values = normal(rng, count, layout.dim).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.01, 1.0, count).astype(np.float32)
        return values, scales if layout.format == "fp8" else ue8m0_words(np.exp2(np.round(np.log2(scales))))
    packed = rng.integers(0, 256, (count, layout.value_bytes), np.uint8)
    scales = np.full((count, 4), 127, np.uint8)
    scales[:, : layout.dim // MXFP4_BLOCK] += rng.integers(-9, 1, (count, layout.dim // MXFP4_BLOCK)).astype(np.uint8)
    return packed, scales.view(np.int32)[:, 0]


def indexer_pool(
    rng: np.random.Generator, layout: IndexerLayout, pages: int, entries: int, used: np.ndarray, padding: int = 0
) -> np.ndarray:
    """An indexer cache in which only the slots `used` hold keys; every other byte is NaN. `padding` in bytes, % 4."""
    pool = empty_pages(pages, entries, layout.row, np.dtype(np.uint8), padding)
    used = np.unique(used)
    layout.scatter(pool, used, *indexer_keys(rng, layout, len(used)))
    return pool


def naming(layout: IndexerLayout, attribute: str = "cache_format") -> dict[str, str]:
    """The attribute that a call over a cache of this format needs, if it needs one."""
    return {} if layout.inferred else {attribute: layout.format}


def block_tables(rng: np.random.Generator, lengths: np.ndarray, entries: int, pages: int, width: int) -> np.ndarray:
    """Block tables [B, width] of distinct shuffled pages; entries past a request's last page are garbage."""
    table = rng.choice([-1, -(2**31), 2**31 - 1, pages], (len(lengths), width)).astype(np.int32)
    free = rng.permutation(pages)
    start = 0
    for row, length in zip(table, lengths, strict=True):
        count = -(-int(length) // entries)
        row[:count] = free[start : start + count]
        start += count
    return table


def slots_of(table: np.ndarray, lengths: np.ndarray, entries: int) -> np.ndarray:
    """Every slot that requests of `lengths` tokens occupy."""
    slots = [
        row[np.arange(n) // entries] * entries + np.arange(n) % entries for row, n in zip(table, lengths, strict=True)
    ]
    return np.concatenate(slots) if slots else np.empty(0, np.int64)


def row_lengths(rng: np.random.Generator, lengths: np.ndarray, next_n: int) -> np.ndarray:
    """Visible keys of each flat token: the last of a request sees all its keys, each earlier one sees one key less."""
    return np.maximum(lengths[:, None] - np.arange(next_n)[::-1], 0).astype(np.int32).reshape(-1)
