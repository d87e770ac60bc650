"""The indexer adds a token's heads in one order, whatever the tile."""

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from conftest import HAS_GPU

from tools import support_matrix
from xmla.core.lang.indexer import heads_of_tile, sum_of_heads

LAUNCH = {"enable_fp_fusion": True}  # spelled out, as by xmla: defaults differ between versions


@triton.jit
def sums_kernel(
    dots_ptr,  # [N, G, I] f32
    weights_ptr,  # [G, I] f32
    out_ptr,  # [N, G] f32
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_I: tl.constexpr,
    RUN: tl.constexpr,
):
    member, head = heads_of_tile(GROUP, BLOCK_I, RUN)
    row = member * BLOCK_I + head
    offs_n = tl.arange(0, N)[:, None]
    sums = sum_of_heads(tl.load(dots_ptr + offs_n * (GROUP * BLOCK_I) + row), tl.load(weights_ptr + row), GROUP, RUN)
    tl.store(out_ptr + offs_n * GROUP + tl.arange(0, GROUP), sums)


def test_no_kernel_adds_more_than_two_heads_in_an_order_of_the_compilers() -> None:
    lines = support_matrix.lines_of(support_matrix.ROOT / "tools" / "head_sums.py")
    assert {line["arch"] for line in lines} == {80, 89, 100, 103, 120}
    assert len({line["kernel"].split()[0] for line in lines}) == 8, "not the kernels that add heads"
    for line in lines:
        assert line["summands"] and set(line["summands"]) == {2}, line


@pytest.mark.parametrize("run", [16, 32])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("warps", [1, 4, 8] if HAS_GPU else [4])
def test_sums_have_the_same_bits_in_every_tile(device: str, heads: int, run: int, warps: int) -> None:
    """A token alone and among others, of summands whose every other order has other bits."""
    rng = np.random.default_rng(heads)
    tokens, keys, run = 4, 16, min(run, heads)
    dots = (rng.standard_normal((tokens, keys, heads)) * 2.0 ** rng.integers(-6, 7, (tokens, keys, heads))).astype("f4")
    weights = rng.standard_normal((tokens, heads)).astype("f4")

    def sums(group: int) -> np.ndarray:
        found = []
        for first in range(0, tokens, group):
            tile = np.ascontiguousarray(dots[first : first + group].swapaxes(0, 1))
            arrays = (torch.from_numpy(a).to(device) for a in (tile, weights[first : first + group]))
            out = torch.empty(keys, group, dtype=torch.float32, device=device)
            sums_kernel[(1,)](*arrays, out, keys, group, heads, run, num_warps=warps, **LAUNCH)
            found.append(out.cpu().numpy())
        return np.concatenate(found, axis=1)

    alone = sums(1)
    exact = np.einsum("tni,ti->nt", dots.astype("f8"), weights.astype("f8"))
    size = np.einsum("tni,ti->nt", np.abs(dots).astype("f8"), np.abs(weights).astype("f8"))
    assert (np.abs(alone - exact) <= heads * 2.0**-24 * size).all()
    for first, second in itertools.pairwise((alone, sums(2), sums(4))):
        np.testing.assert_array_equal(first.view("i4"), second.view("i4"))
