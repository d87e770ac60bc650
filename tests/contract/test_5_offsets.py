"""Clause 5: 64-bit offsets for every page and row product."""

import mmap

import kit
import ml_dtypes
import numpy as np
import torch
from conftest import HAS_GPU
from garbage import DEVICE

from xmla import torch_api


def test_offsets_past_two_and_four_gigabytes() -> None:
    """A pool whose pages lie 2**30 bytes apart, six of them, backed by memory only where it is touched."""
    stride, pages, entries = 1 << 30, 6, 4
    if HAS_GPU:
        pool = torch.empty(pages * stride, dtype=torch.uint8, device=DEVICE)
    else:
        pool = torch.frombuffer(mmap.mmap(-1, pages * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    cache = pool.as_strided((pages, entries, 656), (stride, 656, 1))
    rng = np.random.default_rng(0)
    values = kit.to_torch(rng.standard_normal((pages * entries, 576)).astype(ml_dtypes.bfloat16), DEVICE)
    slots = torch.arange(pages * entries, device=DEVICE, dtype=torch.int32)
    torch_api.write_mla_cache(values[:, :512].contiguous(), values[:, 512:].contiguous(), slots, cache)
    rows = torch_api.read_mla_cache(cache, slots)
    assert torch.equal(rows[:, 512:], values[:, 512:]) and float((rows - values).abs().max()) < 0.3

    indexer = pool.as_strided((pages, entries, 132), (stride, 132, 1), storage_offset=1 << 20)
    keys = values[:, :128].contiguous()
    torch_api.write_indexer_cache(keys, slots, indexer)
    q8, scales = torch_api.read_indexer_cache(indexer, slots)
    assert float((q8.float() * scales[:, None] - keys.float()).abs().max()) < 0.3
    far, near = slots[None].contiguous(), torch.arange(pages * entries, device=DEVICE, dtype=torch.int32)[None]
    q = values[:1, None].expand(1, 16, 576).contiguous()
    out, _ = torch_api.sparse_mla(q, cache, far, softmax_scale=0.05)
    dense, _ = torch_api.sparse_mla(q, rows[:, None], near, softmax_scale=0.05)
    kit.assert_bits_equal("out", out, dense)
