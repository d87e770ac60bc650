"""Clause 5 on a pool of more than 2**32 units of 16 bytes; half of an H200's memory, for one process at a time."""

import kit
import ml_dtypes
import numpy as np
import pytest
import torch

from xmla import torch_api

SPACE = 66 << 30


@pytest.mark.gpu
@pytest.mark.parametrize("row", [656, 132])
def test_a_pool_of_more_than_64_gigabytes(row: int) -> None:
    """What is written at both ends and between is read and attended to; all other bytes are NaN."""
    if torch.cuda.get_device_properties(0).total_memory < SPACE + (2 << 30):
        pytest.skip("needs 68 GiB of device memory")
    rng = np.random.default_rng(0)
    pages = SPACE // (64 * row)
    total = pages * 64
    pool = torch.full((pages, 64, row), 255, dtype=torch.uint8, device="cuda")
    assert pool.nbytes > 64 << 30
    places = np.unique([0, total // 2, total - 1, *rng.integers(0, total, 1021)]).astype(np.int32)
    slots, near = torch.from_numpy(places).cuda(), torch.arange(len(places), device="cuda", dtype=torch.int32)
    small = torch.zeros(len(places), 1, row, dtype=torch.uint8, device="cuda")
    both = ((pool, slots), (small, near))
    values = kit.to_torch(rng.standard_normal((len(places), 576)).astype(ml_dtypes.bfloat16), "cuda")
    if row == 656:
        keys = values[:, :512].contiguous(), values[:, 512:].contiguous()
        q = values[:4, None].expand(4, 16, 576).contiguous()
        for cache, at in both:
            torch_api.write_mla_cache(*keys, at, cache)
        read = [torch_api.read_mla_cache(cache, at) for cache, at in both]
        attended = [torch_api.sparse_mla(q, c, at.expand(4, -1).contiguous(), softmax_scale=0.05) for c, at in both]
        for far, want in zip(*attended, strict=True):
            kit.assert_bits_equal("attention", far, want)
    else:
        for cache, at in both:
            torch_api.write_indexer_cache(values[:, :128].contiguous(), at, cache)
        read = [torch_api.read_indexer_cache(cache, at)[0] for cache, at in both]
    kit.assert_bits_equal("rows", *read)
