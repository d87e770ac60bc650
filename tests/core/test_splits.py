"""Results of splits are combined as one softmax over their keys, by the function that kernels launch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from xmla.core.ops.attention.sparse_mla.constants import Combination, Epilogue
from xmla.core.ops.attention.sparse_mla.kernels import combine_splits_kernel
from xmla.core.ops.attention.sparse_mla.splits import MOST_SPLITS, split_counts
from xmla.core.values import next_power_of_2

TOKENS, HEADS, DIMS = 2, 3, 512
EPILOGUE = Epilogue(HAS_SINK=False, EMPTY_LSE=-np.inf, LSE_UNIT=1.0, LSE_SINK=False, ROPE=0, COS_SIN_STRIDE=0)


def combine(
    parts: torch.Tensor, lse: torch.Tensor, powers: int, skip: bool, programs: int, cos_sin: torch.Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Combine the parts of each head by so many programs; with angles, tokens at positions 0, 1, …"""
    splits = parts.shape[1]
    rope = () if cos_sin is None else (cos_sin, torch.arange(TOKENS, dtype=torch.int32, device=parts.device))
    epilogue = replace(EPILOGUE, ROPE=rope[0].shape[1], COS_SIN_STRIDE=rope[0].stride(0)) if rope else EPILOGUE
    out, out_lse = (torch.full(shape, torch.nan, device=parts.device) for shape in ((TOKENS, HEADS, DIMS), (TOKENS, 3)))
    with np.errstate(all="ignore"):  # NumPy warns of a row without a key
        most = next_power_of_2(splits)
        constants = Combination(
            HEADS=HEADS,
            EPILOGUE=epilogue,
            PARTS=programs,
            POWERS=powers,
            SKIP=skip,
            MAX_SPLITS=most,
            AT_ONCE=most,
            OVERLAP_LIMIT=0,
        )
        combine_splits_kernel[(TOKENS * HEADS * programs,)](
            parts,
            lse,
            lse,
            *(rope or (lse, lse)),
            splits,
            len(rope and rope[0]),
            out,
            out_lse,
            C=constants,
            enable_fp_fusion=True,
        )
    return out.cpu().numpy(), out_lse.cpu().numpy()


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("powers", [0, 2, 4])
@pytest.mark.parametrize(("splits", "programs"), [(2, 1), (9, 4), (32, 2), (33, 1), (70, 2), (130, 4)])
def test_splits_together(device: str, splits: int, programs: int, powers: int, skip: bool) -> None:
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
    got, got_lse = combine(*(torch.from_numpy(a).to(device) for a in (stored, stored_lse)), powers, skip, programs)
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


@pytest.mark.parametrize("programs", [2, 4])
def test_the_last_program_of_a_head_turns_its_roped_dims(device: str, programs: int) -> None:
    rng = np.random.default_rng(programs)
    parts = torch.from_numpy(rng.standard_normal((TOKENS, 9, HEADS, DIMS)).astype(np.float32)).to(device)
    lse = torch.from_numpy(rng.standard_normal((TOKENS, 9, 1, HEADS)).astype(np.float32)).to(device)
    angles = torch.from_numpy(rng.standard_normal((TOKENS, 32)))
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float().to(device)
    (plain, _), (got, _) = (combine(parts, lse, 0, False, programs, with_angles) for with_angles in (None, cos_sin))
    even, odd = plain[..., -64::2], plain[..., -63::2]
    cos, sin = (table[:, None].numpy() for table in (angles.cos(), angles.sin()))
    turned = np.stack([even * cos + odd * sin, odd * cos - even * sin], -1).reshape(TOKENS, HEADS, 64)
    assert np.array_equal(got[..., :-64], plain[..., :-64])
    assert np.allclose(got[..., -64:], turned, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tiles", [*range(130), 1000, 4095, 4096, 4097, 9999])
def test_numbers_of_splits_are_the_least_that_leave_as_many_tiles(tiles: int) -> None:
    every = range(1, min(tiles, MOST_SPLITS) + 1)
    assert split_counts(tiles) == tuple(sorted({-(-tiles // -(-tiles // n)) for n in every} | {1}))
