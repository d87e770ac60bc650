"""Byte layouts of the paged caches: the only place that knows an offset.

An entry's slot is `page * R + offset`. Page strides are free; within a page every layout is dense.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from xmla.core.spec import Spec

E4M3_MAX = 448.0


def power_of_two_exponent(amax: np.ndarray, min_exponent: int) -> np.ndarray:
    """Smallest integer e ≥ min_exponent with 448 · 2**e ≥ amax, exactly, from the bits of float32 `amax`.

    448 = 1.75 · 2**8, so only the exponent field and whether the significand exceeds 1.75 matter.
    """
    bits = amax.astype(np.float32).view(np.int32)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000)
    return np.maximum(exponent, min_exponent)


def quantize(values: np.ndarray, min_exponent: int) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 values and float32 power-of-two scales of `values` [..., dims], one scale over the last axis.

    q = round_to_nearest_even(clamp(x / s, ±448)), s = 2**e. NaN stays NaN and does not count towards the scale.
    """
    wide = values.astype(np.float32)
    exponent = power_of_two_exponent(np.nanmax(np.abs(wide), axis=-1, initial=0.0), min_exponent)
    scale = np.ldexp(np.float32(1), exponent)
    scaled = np.clip(np.ldexp(wide, -exponent[..., None]), -E4M3_MAX, E4M3_MAX)
    return scaled.astype(ml_dtypes.float8_e4m3fn), scale


@dataclass(frozen=True, slots=True)
class MlaLayout:
    """Entries of the latent cache, each a row of ROW elements; `tile` latent dims share one scale.

    Attributes:
        packed: Bytes with scales inside the row, or plain rows [latent ∥ rope] of a floating dtype.
        min_exponent: Writers never store a scale below 2**min_exponent.
    """

    name: str
    packed: bool
    row: int
    latent: int = 512
    rope: int = 64
    tile: int = 128
    scale_offset: int = 0
    rope_offset: int = 512
    min_exponent: int = -13

    def write(self, latent: np.ndarray, rope: np.ndarray) -> np.ndarray:
        """Packed rows [T, ROW] uint8 of latent [T, L] and rope [T, E]."""
        rows = np.zeros((len(latent), self.row), np.uint8)
        values, scales = quantize(latent.reshape(len(latent), self.latent // self.tile, self.tile), self.min_exponent)
        rows[:, : self.latent] = values.reshape(len(latent), self.latent).view(np.uint8)
        rows[:, self.scale_offset : self.rope_offset] = scales.view(np.uint8)
        rows[:, self.rope_offset :] = rope.astype(ml_dtypes.bfloat16).view(np.uint8)
        return rows

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Rows [..., ROW] as float32 [..., L+E], exactly what they stand for before any rounding to 16 bits."""
        if not self.packed:
            return rows.astype(np.float32)
        rows = np.ascontiguousarray(rows).view(np.uint8)
        lead = rows.shape[:-1]
        values = np.ascontiguousarray(rows[..., : self.latent]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        scales = np.ascontiguousarray(rows[..., self.scale_offset : self.rope_offset]).view(np.float32)
        rope = np.ascontiguousarray(rows[..., self.rope_offset :]).view(ml_dtypes.bfloat16).astype(np.float32)
        latent = (values.reshape(*lead, self.latent // self.tile, self.tile) * scales[..., None]).reshape(
            *lead, self.latent
        )
        return np.concatenate([latent, rope], axis=-1)


# DeepSeek-V3.2 ("fp8_ds_mla", FlashMLA README): 512 e4m3, 4 float32 scales of 128 dims each, 64 bf16 roped dims.
# The floor of the scale, 2**-13, is that of FlashMLA's writer: 2**ceil(log2(1e-4)).
V32 = MlaLayout("v32", packed=True, row=656, scale_offset=512, rope_offset=528)
PLAIN = MlaLayout("plain", packed=False, row=576)


def mla_layout(spec: Spec) -> MlaLayout | None:
    """The layout of a cache [P, R, ROW], or None if no layout has rows of this size and dtype."""
    layout = V32 if spec.itemsize == 1 else PLAIN
    return layout if spec.shape[-1] == layout.row else None


@dataclass(frozen=True, slots=True)
class IndexerLayout:
    """Pages of indexer keys: R rows of `dim` e4m3 values, then R float32 scales (DeepGEMM, vLLM, SGLang: 132 B at 128).

    The tensor's last axis is dim + 4, but an entry's scale is not beside its values: it stands in the page's footer.
    """

    dim: int
    # 2**ceil(log2(1e-4 / 448)): DeepSeek's reference floors amax at 1e-4.
    min_exponent: int = -22

    @property
    def row(self) -> int:
        return self.dim + 4

    def gather(self, cache: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """e4m3 values [..., D] and float32 scales [...] of `slots`, each of which is in range."""
        values, scales = self._sections(cache)
        page, offset = np.divmod(slots, cache.shape[1])
        return values[page, offset], scales[page, offset]

    def scatter(self, cache: np.ndarray, slots: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
        """Store values [T, D] and scales [T] at `slots` of `cache` [P, R, D+4] (dense pages), in place."""
        all_values, all_scales = self._sections(cache)
        page, offset = np.divmod(slots, cache.shape[1])
        all_values[page, offset] = values
        all_scales[page, offset] = scales

    def _sections(self, cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of the values [P, R, D] and the scales [P, R] of all pages."""
        pages, entries, row = cache.shape
        flat = cache.view(np.uint8).reshape(pages, entries * row, copy=False)
        values = flat[:, : entries * self.dim].view(ml_dtypes.float8_e4m3fn)
        return values.reshape(pages, entries, self.dim, copy=False), flat[:, entries * self.dim :].view(np.float32)
