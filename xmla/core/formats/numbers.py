"""Quantisation of values with scales, in NumPy: the rules that kernels follow bit for bit."""

from typing import Any

import ml_dtypes
import numpy as np

# Element types of quantised values: the NumPy dtype and the largest magnitude.
VALUES: dict[str, tuple[Any, float]] = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}
MXFP4_BLOCK = 32  # dims that share a scale
NAN_SCALE = 255  # the UE8M0 byte that makes its block NaN


def power_of_two_exponent(amax: np.ndarray, greatest: float, min_exponent: int) -> np.ndarray:
    """Smallest integer e ≥ min_exponent with greatest · 2**e ≥ amax, exactly.

    Adding e to a float's exponent adds e · 2**23 to its bits, so e is the difference of the bits over 2**23, rounded
    up.
    """
    difference = amax.astype(np.float32).view(np.int32) - np.float32(greatest).view(np.int32)
    return np.maximum(-(-difference >> 23), min_exponent)


def quantize(values: np.ndarray, min_exponent: int, kind: str = "e4m3") -> tuple[np.ndarray, np.ndarray]:
    """e4m3 or e2m1 values and float32 power-of-two scales of `values` [..., dims], one scale over the last axis.

    q = round_to_nearest_even(clamp(x / s, ±greatest)), s = 2**e. NaN is ignored when the scale is chosen. It stays NaN
    in e4m3; e2m1 has no NaN, so there it makes the scale NaN.
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
        scaled = np.where(broken, np.float32(greatest), scaled)  # as the conversion instruction does
    return scaled.astype(dtype), scale


def quantize_nvfp4(values: np.ndarray, scale_up: bool) -> tuple[np.ndarray, np.ndarray]:
    """e2m1 values and e4m3 scales (as float32) of `values` [..., dims], one scale over the last axis.

    s = e4m3(clamp(max|x| / 6, 2**-9, 448)), rounded to nearest, so that the largest value may saturate, or up if
    `scale_up`. q = round_to_nearest_even(clamp(x / s, ±6)). Quotients are in float32. NaN makes the scale NaN and is
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


def quantize_mxfp4(values: np.ndarray, min_exponent: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed e2m1 [..., D/2] uint8 and UE8M0 bytes [..., D/32] of `values` [..., D], one power of two per 32 dims.

    q = round_to_nearest_even(clamp(x / 2**e, ±6)), e the smallest ≥ min_exponent with 6 · 2**e ≥ max|x|. The even
    dim is in the low nibble. −0, and values that round to it, keep their sign, as in `cvt.rn.satfinite.e2m1x2`. e2m1
    has no NaN: a block that contains one gets the scale byte 255, which makes the whole block NaN. The NaN itself is
    stored as +6, as by that instruction.
    """
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // MXFP4_BLOCK, MXFP4_BLOCK)
    rounded, factors = quantize(blocks, min_exponent, kind="e2m1")
    codes = rounded.view(np.uint8).reshape(values.shape)
    scales = np.where(np.isnan(factors), NAN_SCALE, np.frexp(factors)[1] + 126)
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8), scales.astype(np.uint8)


def dequantize_mxfp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantise packed e2m1 [..., D/2] with UE8M0 bytes [..., D/32] to float64 [..., D]."""
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*scales.shape, MXFP4_BLOCK)
    factors = np.where(scales == NAN_SCALE, np.nan, np.ldexp(1.0, scales.astype(np.int32) - 127))
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64) * factors[..., None]
    return values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
