"""Clause 5: 64-bit offsets for every page and row product."""

import mmap
from collections.abc import Iterator

import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import HAS_GPU
from garbage import DEVICE, OPS

from xmla import UnsupportedError, torch_api
from xmla.core.device import H200
from xmla.core.model import Call
from xmla.core.op import Op
from xmla.core.spec import Spec

# Half of a GPU's memory: one worker has all of these tests.
pytestmark = pytest.mark.xdist_group("device memory")

FAR = 66 << 30 if HAS_GPU else 9 << 30  # bytes from an array's first row to its last


@pytest.fixture(scope="module")
def space() -> Iterator[torch.Tensor]:
    """Memory to lay rows out in; on the CPU it is backed only where it is touched."""
    if HAS_GPU:
        yield torch.empty(FAR, dtype=torch.uint8, device=DEVICE)
    else:
        unreserved = 0x4000  # Linux' MAP_NORESERVE, which Python names from 3.13 on
        mapped = mmap.mmap(-1, FAR, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
        yield torch.frombuffer(mapped, dtype=torch.uint8)


def spread(tensor: torch.Tensor, space: torch.Tensor) -> torch.Tensor:
    """A copy whose first axis reaches over all of `space`."""
    raw = space.view(tensor.dtype)
    step = (raw.numel() - tensor[0].numel()) // (len(tensor) - 1)
    step = min(step, 2**31 - 1) // 256 * 256  # some strides are runtime sizes
    far = raw.as_strided(tensor.shape, (step, *torch.empty(tensor.shape[1:], device="meta").stride()))
    far.copy_(tensor)
    return far


SPREAD = [(op, name) for op in OPS.values() for name, tensor in op.tensors.items() if len(tensor.names) > 1]


@pytest.mark.parametrize(("op", "argument"), SPREAD, ids=lambda value: getattr(value, "name", value))
def test_rows_and_pages_far_apart(space: torch.Tensor, op: Op, argument: str) -> None:
    """Each argument in turn with its rows, or its cache's pages, past 2**32 bytes: the bits of the dense call."""
    case = next(c for c in op.cases if argument in kit.make(c) and len(kit.make(c)[argument]) > 1)
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    where = None
    if op.name == "indexer_logits_paged":
        where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))
    calls = []
    for far in (False, True):
        arguments = dict(zip(op.tensors, kit.torch_inputs(op, kit.copies(inputs), DEVICE), strict=True))
        if far:
            arguments[argument] = spread(arguments[argument], space)
        results = kit.as_tuple(getattr(torch_api, op.name)(*arguments.values(), **case.attrs))
        calls.append([*results, *(arguments[name] for name in op.mutates)])
    for near, far in zip(*calls, strict=True):
        kit.assert_bits_equal(op.name, far, near, where)


def test_a_stride_past_31_bits_is_refused() -> None:
    logits, ends = Spec((2, 64), "float32", (2**33, 1)), Spec((2,), "int32")
    with pytest.raises(UnsupportedError, match=f"select_topk: topk_candidates_kernel takes {2**33}, supported: sizes"):
        Call("select_topk", {"logits": logits, "ends": ends}, {"k": 8}).plan(H200)


@pytest.mark.gpu
def test_a_pool_of_more_than_64_gigabytes(space: torch.Tensor) -> None:
    """Dense pools, every slot a number of its own: what is written at both ends and between is what is attended to."""
    rng = np.random.default_rng(0)
    for row, write in ((656, torch_api.write_mla_cache), (132, torch_api.write_indexer_cache)):
        pages = FAR // (64 * row)
        pool = space[: pages * 64 * row].view(pages, 64, row)
        assert pool.nbytes > 64 << 30
        total = pages * 64
        places = np.unique([0, total // 2, total - 1, *rng.integers(0, total, 1021)]).astype(np.int32)
        slots = torch.from_numpy(places).to(DEVICE)
        values = kit.to_torch(rng.standard_normal((len(places), 576)).astype(ml_dtypes.bfloat16), DEVICE)
        small = torch.zeros(len(places), 1, row, dtype=torch.uint8, device=DEVICE)
        near = torch.arange(len(places), device=DEVICE, dtype=torch.int32)
        if row == 656:
            keys = values[:, :512].contiguous(), values[:, 512:].contiguous()
            write(*keys, slots, pool)
            write(*keys, near, small)
            read = [torch_api.read_mla_cache(c, s) for c, s in ((pool, slots), (small, near))]
            q = values[:4, None].expand(4, 16, 576).contiguous()
            calls = [(pool, slots), (small, near)]
            attended = [torch_api.sparse_mla(q, c, s.expand(4, -1).contiguous(), softmax_scale=0.05) for c, s in calls]
            for far, want in zip(*attended, strict=True):
                kit.assert_bits_equal("attention", far, want)
        else:
            write(values[:, :128].contiguous(), slots, pool)
            write(values[:, :128].contiguous(), near, small)
            read = [torch_api.read_indexer_cache(c, s)[0] for c, s in ((pool, slots), (small, near))]
        kit.assert_bits_equal("rows", *read)


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
