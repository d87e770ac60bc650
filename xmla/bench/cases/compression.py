"""V4's compressors: decode steps in which every request completes an entry, and a prefill."""

from collections.abc import Iterator
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import problems
from xmla.bench.benchmark import Benchmark, rotation
from xmla.bench.errors import relative_error
from xmla.core.formats.mla import V4
from xmla.core.values import cdiv
from xmla.torch_api._all_ops import TORCH_OPS

CONTEXT = 8192
# Name, dims of an entry, series and tokens per entry.
COMPRESSORS = (("ratio 4", 512, 2, 4), ("ratio 128", 512, 1, 128), ("indexer", 128, 2, 4))
STATE, CACHE = 6, 8  # places of the arrays that a call updates


def compressor_case(name: str, dim: int, series: int, ratio: int, requests: int, new: int) -> Benchmark:
    width, page = series * dim, 2 if ratio == 128 else 64
    tokens, owned = requests * new, cdiv(series * ratio - 1 + new, 8)
    emitted = requests * max(new // ratio, 1)
    row = V4.row if dim == 512 else dim + 4
    moved = tokens * width * 2 * (2 + 4) + emitted * (series * ratio * dim * 2 * 4 + row)
    sets = rotation(moved)
    kv, score = (problems.bfloat16(sets, tokens, width) for _ in range(2))
    rings = torch.randperm(requests * owned, device=problems.DEVICE, dtype=torch.int32).view(requests, owned)
    entries = requests * CONTEXT // ratio
    weight, cos_sin = torch.rand(dim, device=problems.DEVICE) + 0.5, torch.randn(CONTEXT, 64, device=problems.DEVICE)
    positions = torch.arange(CONTEXT - new, CONTEXT, device=problems.DEVICE, dtype=torch.int32).repeat(requests)
    state = torch.randn(requests * owned, 8, 2 * width, device=problems.DEVICE)
    state_table = rings[:, torch.arange(CONTEXT // 8, device=problems.DEVICE) % owned].contiguous()
    cache = problems.latent_pool(entries, page, V4) if dim == 512 else problems.indexer_pool(entries, page)
    table = problems.block_table(requests, CONTEXT // ratio, page)
    bias = torch.randn(ratio, width, device=problems.DEVICE)
    inputs = [
        (kv[i], score[i], bias, weight, cos_sin, positions, state, state_table, cache, table) for i in range(sets)
    ]

    def call(ops: Any, *arrays: Any) -> Any:
        updated = ops.compress_kv(*arrays)
        return (arrays[STATE], arrays[CACHE]) if updated is None else updated  # PyTorch updates them in place

    def check() -> float:
        """Error of the last entry, in the cache's format."""
        call(TORCH_OPS, *inputs[0])
        window = positions[-1] + 1 - torch.arange(series * ratio, 0, -1, device=problems.DEVICE)
        rows = state[state_table[-1, window // 8].long(), window % 8].view(series, ratio, 2, series, -1)
        values, scores = torch.cat([rows[group, :, :, group] for group in range(series)]).double().unbind(1)
        pooled = (scores.softmax(0) * values).sum(0)
        want = pooled / (pooled.square().mean() + 1e-6).sqrt() * weight
        cos, sin = cos_sin[positions[-1] + 1 - ratio].double().view(2, -1)
        even, odd = want[-64::2].clone(), want[-63::2].clone()
        want[-64::2], want[-63::2] = even * cos - odd * sin, even * sin + odd * cos
        entry = positions[-1] // ratio
        slot = (table[-1, entry // cache.shape[1]] * cache.shape[1] + entry % cache.shape[1])[None]
        if dim == 512:
            return relative_error(torch_api.read_mla_cache(cache, slot, dtype="float32")[0], want)
        keys, scales = torch_api.read_indexer_cache(cache, slot)
        return relative_error(keys[0].float() * scales[0], want)

    return Benchmark(
        op="compress_kv",
        case=f"{name} b={requests} tokens={tokens}",
        call=call,
        inputs=inputs,
        updates=(STATE, CACHE),
        check=check,
        bytes=moved,
        tolerance=2**-4,  # half a step of e4m3 at most
    )


def compressors() -> Iterator[Benchmark]:
    for compressor in COMPRESSORS:
        for requests, new in ((1, 1), (64, 1), (256, 1), (1, CONTEXT)):
            yield compressor_case(*compressor, requests, new)
