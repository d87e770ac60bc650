"""Selections in blocks as DeepSeek-V4.1 has them: the blocks of its source layer, and the keys of a layer within them.

Peers are the selection over the whole context, and vLLM's kernels for blocks over the same logits, of all keys.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark, rotation
from xmla.core.plan import cdiv

HEADS, DIMS, K, BLOCKS, GRANULARITY = 32, 128, 512, 2048, 8
WHOLE, VLLM = "whole context", "vLLM's blocks"
PAGED = ((1, 32768), (1, 131072), (1, 1 << 20), (64, 32768), (64, 131072))


def missed(got: torch.Tensor, want: torch.Tensor) -> float:
    """The share of selected columns [T, n] that `want` has not, in any order; −1 is none."""
    columns = int(max(got.max(), want.max())) + 2
    known = torch.zeros(len(want), columns, dtype=torch.bool, device=want.device).scatter_(1, want.long() + 1, True)
    return 1 - float(known.gather(1, got.long() + 1).float().mean())


def by_vllm(
    q8: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
    blocks: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """The blocks of a step, or the keys in its `blocks`, by vLLM's kernels over xmla's logits of all keys."""
    logits = torch_api.indexer_logits_paged(q8, weights, pool, table, lengths)
    if blocks is None:
        select = baselines.vllm_blocks(logits, lengths, BLOCKS, GRANULARITY)
    else:
        select = baselines.vllm_topk_in_blocks(logits, lengths, blocks, K, GRANULARITY)

    def call() -> torch.Tensor:
        torch_api.indexer_logits_paged(q8, weights, pool, table, lengths, out=logits)
        return select()

    return call


def queries(pool: torch.Tensor, requests: int, keys: int) -> list[tuple[torch.Tensor, ...]]:
    q8, weights = problems.e4m3(requests, HEADS, DIMS), torch.randn(requests, HEADS, device=problems.DEVICE)
    tables = problems.shuffled(problems.block_table(requests, keys), rotation(requests * BLOCKS * GRANULARITY * 132))
    lengths = torch.full((requests,), keys, device=problems.DEVICE, dtype=torch.int32)
    return [(q8, weights, pool, table, lengths) for table in tables]


def blocks_case(pool: torch.Tensor, requests: int, keys: int) -> Benchmark:
    inputs = queries(pool, requests, keys)

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_blocks_paged(*arrays, k=BLOCKS, granularity=GRANULARITY)

    def best_blocks() -> torch.Tensor:
        logits = torch_api.indexer_logits_paged(*inputs[0])[:, :keys]
        best = logits.view(requests, cdiv(keys, GRANULARITY), GRANULARITY).amax(2)
        best[:, -1] = torch.inf
        return best.topk(BLOCKS).indices

    prepared = cache(lambda i: by_vllm(*inputs[i]))
    return Benchmark(
        op="indexer_blocks_paged",
        case=f"b={requests} keys={keys} {BLOCKS} of {GRANULARITY}",
        call=call,
        inputs=inputs,
        check=lambda: missed(call(torch_api, *inputs[0]), best_blocks()),
        peers={
            WHOLE: lambda i: torch_api.indexer_topk_paged(*inputs[i], k=K),
            VLLM: lambda i: prepared(i)(),
        },
        peer_checks={VLLM: lambda: missed(prepared(0)(), best_blocks())},
        flops=2 * requests * keys * HEADS * DIMS,
        bytes=requests * keys * 132,
    )


def within_case(pool: torch.Tensor, requests: int, keys: int) -> Benchmark:
    """In the blocks of the same queries, whose best keys are those of the whole context."""
    inputs = [
        (*arrays, torch_api.indexer_blocks_paged(*arrays, k=BLOCKS, granularity=GRANULARITY))
        for arrays in queries(pool, requests, keys)
    ]

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_block_topk_paged(*arrays, k=K, granularity=GRANULARITY)

    def whole(i: int) -> torch.Tensor:
        return torch_api.indexer_topk_paged(*inputs[i][:5], k=K)

    prepared = cache(lambda i: by_vllm(*inputs[i]))
    return Benchmark(
        op="indexer_block_topk_paged",
        case=f"b={requests} keys={keys} k={K} in {BLOCKS} of {GRANULARITY}",
        call=call,
        inputs=inputs,
        check=lambda: missed(call(torch_api, *inputs[0]), whole(0)),
        peers={WHOLE: whole, VLLM: lambda i: prepared(i)()},
        peer_checks={VLLM: lambda: missed(prepared(0)(), whole(0))},
        flops=2 * requests * BLOCKS * GRANULARITY * HEADS * DIMS,
        bytes=requests * BLOCKS * GRANULARITY * 132,
    )


def cases(case: Callable[[torch.Tensor, int, int], Benchmark]) -> Iterator[Benchmark]:
    pool = problems.indexer_pool(max(requests * keys for requests, keys in PAGED))
    for requests, keys in PAGED:
        yield case(pool, requests, keys)


sources, within = partial(cases, blocks_case), partial(cases, within_case)
