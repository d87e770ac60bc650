"""The indexer's logits, at the shapes of DeepGEMM's benchmark."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark, rotation
from xmla.bench.errors import relative_error
from xmla.torch_api._all_ops import TORCH_OPS

TOLERANCE = 3e-3  # DeepGEMM's own bound, 1 − 2Σab/Σ(a²+b²) < 5e-6, as a relative norm
HEADS, DIMS = 64, 128
CHECKED_TOKENS = 64
DEEP_GEMM = "DeepGEMM"


def ragged_case(heads: int, tokens: int, keys: int) -> Benchmark:
    q8, weights = problems.e4m3(tokens, heads, DIMS), torch.randn(tokens, heads, device=problems.DEVICE)
    k8, scales = problems.e4m3(keys, DIMS), torch.rand(keys, device=problems.DEVICE) + 0.1
    starts, ends = problems.causal(tokens, keys)
    arguments = q8, weights, k8, scales, starts, ends

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_logits(*arrays)

    def written(logits: torch.Tensor) -> torch.Tensor:
        return logits.where(torch.arange(keys, device=problems.DEVICE) < ends[:, None], 0)

    def error(logits: torch.Tensor) -> float:
        rows = slice(CHECKED_TOKENS)
        dots = torch.einsum("tid,nd->tin", q8[rows].float(), k8.float()).relu()
        want = torch.einsum("tin,ti->tn", dots, weights[rows]) * scales
        valid = torch.arange(keys, device=problems.DEVICE) < ends[rows, None]
        return relative_error(logits[rows, :keys][valid], want[valid])

    prepared = cache(lambda: baselines.deep_gemm_logits(*arguments))

    return Benchmark(
        op="indexer_logits",
        case=f"i={heads} s_q={tokens} s_kv={keys} causal",
        call=call,
        inputs=[arguments],
        check=lambda: error(call(TORCH_OPS, *arguments)),
        peers={DEEP_GEMM: lambda _: prepared()()},
        peer_checks={DEEP_GEMM: lambda: error(prepared()())},
        written=written,
        flops=2 * int(ends.sum()) * heads * DIMS,
        bytes=tokens * keys * 4,
        bound="fp8",
        tolerance=TOLERANCE,
    )


def ragged() -> Iterator[Benchmark]:
    """Logits of prefill over contiguous keys."""
    for heads in (64, 32):
        for tokens, keys in ((2048, 8192), (2048, 65536), (8192, 65536)):
            yield ragged_case(heads, tokens, keys)


WIDEST = 65536  # keys that a block table holds
PAGED = ((64, 1, 8192), (64, 2, 8192), (64, 4, 8192), (64, 1, WIDEST), (64, 2, WIDEST), (64, 4, WIDEST),
         (1, 1, WIDEST), (4, 1, WIDEST))  # fmt: skip


def paged_case(pool: torch.Tensor, requests: int, next_n: int, keys: int) -> Benchmark:
    tokens, read = requests * next_n, requests * keys * 132
    q8, weights = problems.e4m3(tokens, HEADS, DIMS), torch.randn(tokens, HEADS, device=problems.DEVICE)
    tables = problems.shuffled(problems.block_table(requests, WIDEST), rotation(read))
    lengths = torch.full((tokens,), keys, device=problems.DEVICE, dtype=torch.int32)
    inputs = [(q8, weights, pool, table, lengths) for table in tables]

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_logits_paged(*arrays)

    def error(logits: torch.Tensor) -> float:
        place = torch.arange(keys, device=problems.DEVICE)
        k8, scales = torch_api.read_indexer_cache(pool, tables[0][0, place // 64] * 64 + place % 64)
        want = (q8[0].float() @ k8.float().T).relu().T @ weights[0] * scales
        return relative_error(logits[0, :keys], want)

    prepared = cache(lambda i: baselines.deep_gemm_paged_logits(*inputs[i], max_len=WIDEST))

    return Benchmark(
        op="indexer_logits_paged",
        case=f"b={requests} next_n={next_n} keys={keys}",
        call=call,
        inputs=inputs,
        check=lambda: error(call(TORCH_OPS, *inputs[0])),
        peers={DEEP_GEMM: lambda i: prepared(i)()},
        peer_checks={DEEP_GEMM: lambda: error(prepared(0)())},
        written=lambda logits: logits[:, :keys],
        flops=2 * tokens * keys * HEADS * DIMS,
        bytes=read + tokens * keys * 4,
        tolerance=TOLERANCE,
    )


def paged() -> Iterator[Benchmark]:
    """Logits of decode over the paged cache."""
    pool = problems.indexer_pool(64 * WIDEST)
    for requests, next_n, keys in PAGED:
        yield paged_case(pool, requests, next_n, keys)
