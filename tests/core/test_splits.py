"""Results of splits are combined as one softmax over their keys, by the function that kernels launch."""

import numpy as np
import pytest
import torch

from xmla.core.ops.sparse_mla.constants import Combination, Epilogue
from xmla.core.ops.sparse_mla.kernels import combine_splits_kernel
from xmla.core.plan import next_power_of_2

TOKENS, HEADS, DIMS = 2, 3, 512
EPILOGUE = Epilogue(HAS_SINK=False, EMPTY_LSE=-np.inf, LSE_UNIT=1.0, LSE_SINK=False, ROPE=0, COS_SIN_STRIDE=0)


def combine(parts: torch.Tensor, lse: torch.Tensor, powers: int, skip: bool) -> tuple[np.ndarray, np.ndarray]:
    splits = parts.shape[1]
    out, out_lse = (torch.full(shape, torch.nan, device=parts.device) for shape in ((TOKENS, HEADS, DIMS), (TOKENS, 3)))
    with np.errstate(all="ignore"):  # NumPy warns of a row without a key
        most = next_power_of_2(splits)
        constants = Combination(
            HEADS=HEADS, EPILOGUE=EPILOGUE, POWERS=powers, SKIP=skip, MAX_SPLITS=most, OVERLAP_LIMIT=0
        )
        combine_splits_kernel[(TOKENS * HEADS,)](
            parts, lse, lse, lse, lse, splits, 0, out, out_lse, C=constants, enable_fp_fusion=True
        )
    return out.cpu().numpy(), out_lse.cpu().numpy()


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("powers", [0, 2, 4])
@pytest.mark.parametrize("splits", [2, 9, 32, 33, 70])
def test_splits_together(device: str, splits: int, powers: int, skip: bool) -> None:
    """Splits whose weights lie far apart, some of them without a key, a row without any, and a NaN.

    Groups of dims have magnitudes that float16 would not hold. What a split without keys need not write is NaN.
    """
    rng = np.random.default_rng(splits)
    parts = rng.standard_normal((TOKENS, splits, HEADS, DIMS)).astype(np.float32)
    lse = (rng.standard_normal((TOKENS, splits, HEADS)) * 8).astype(np.float32)
    absent = rng.random(lse.shape) < 0.3
    absent[0, :, 1] = True
    absent[1, -1] = False
    parts[absent], lse[absent] = 0.0, -np.inf
    parts[1, -1, 2, 7] = np.nan
    stored, stored_lse = parts, lse[:, :, None]
    if powers:
        units = np.float32(2.0) ** rng.integers(-40, 40, (TOKENS, splits, powers, HEADS))
        by_dim = units.repeat(DIMS // powers, 2).transpose(0, 1, 3, 2)
        stored = parts.astype(np.float16)
        parts = stored * by_dim
        units = np.where(absent[:, :, None] & skip, np.nan, units).astype(np.float32)
        stored_lse = np.concatenate([stored_lse, units], 2)
    stored = np.where(absent[..., None] & skip, np.nan, stored).astype(stored.dtype)
    got, got_lse = combine(*(torch.from_numpy(a).to(device) for a in (stored, stored_lse)), powers, skip)
    weights = np.exp2(lse - np.where(absent.all(1), 0, lse.max(1))[:, None])
    total = weights.sum(1)
    shares = weights / np.where(total == 0, 1, total)[:, None]
    want, sizes = (np.einsum("tsh,tshd->thd", shares, p, dtype=np.float64) for p in (parts, np.abs(parts)))
    assert np.array_equal(np.isnan(got), np.isnan(want)) and np.isnan(got).sum() == 1
    # Differences of up to 32 in base 2 are rounded before they become weights.
    assert (np.abs(got - want) <= 2**-18 * sizes)[~np.isnan(want)].all()
    assert not got[0, 1].any() and got_lse[0, 1] == -np.inf
    seen = total > 0
    assert np.allclose(got_lse[seen], (lse.max(1) + np.log2(np.where(seen, total, 1)))[seen], rtol=0, atol=1e-5)
