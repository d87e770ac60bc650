"""Selections in blocks as DeepSeek-V4.1 has them: the blocks of its source layer, and the keys of a layer within them.

Of steps of decode and of chunks of prefill. Peers are the selection over the whole context, and vLLM's kernels for
blocks over the same logits, of all keys.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark, rotation

HEADS, DIMS, K, BLOCKS, GRANULARITY = 32, 128, 512, 2048, 8
WHOLE, VLLM = "whole context", "vLLM's blocks"
PAGED = ((1, 32768), (1, 131072), (1, 1 << 20), (64, 32768), (64, 131072))
RAGGED = ((4096, 32768), (2048, 131072), (512, 524288))  # the last tokens of a prompt, and its keys


def missed(got: torch.Tensor, want: torch.Tensor) -> float:
    """The share of selected columns [T, n] that `want` has not, in any order; −1 is none."""
    columns = int(max(got.max(), want.max())) + 2
    known = torch.zeros(len(want), columns, dtype=torch.bool, device=want.device).scatter_(1, want.long() + 1, True)
    return 1 - float(known.gather(1, got.long() + 1).float().mean())


def by_vllm(
    score: Callable[..., torch.Tensor], ends: torch.Tensor, blocks: torch.Tensor | None = None, prefill: bool = False
) -> Callable[[], torch.Tensor]:
    """The best blocks, or the keys in these `blocks`, by vLLM's kernels over the logits of all keys by `score`."""
    logits = score()
    if blocks is None:
        select = baselines.vllm_blocks(logits, ends, BLOCKS, GRANULARITY)
    else:
        topk = baselines.vllm_topk_of_prefill if prefill else baselines.vllm_topk
        select = baselines.vllm_in_blocks(logits, ends, blocks, GRANULARITY, topk(logits, ends, K))

    def call() -> torch.Tensor:
        score(out=logits)
        return select()

    return call


def best_blocks(logits: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """By torch, of logits [T, N] that are −∞ from each row's end on."""
    best = logits.view(len(logits), -1, GRANULARITY).amax(2)
    best[torch.arange(len(best), device=best.device), (ends.long() - 1) // GRANULARITY] = torch.inf
    return best.topk(BLOCKS).indices


def queries(pool: torch.Tensor, requests: int, keys: int) -> list[tuple[torch.Tensor, ...]]:
    q8, weights = problems.e4m3(requests, HEADS, DIMS), torch.randn(requests, HEADS, device=problems.DEVICE)
    tables = problems.shuffled(problems.block_table(requests, keys), rotation(requests * BLOCKS * GRANULARITY * 132))
    lengths = torch.full((requests,), keys, device=problems.DEVICE, dtype=torch.int32)
    return [(q8, weights, pool, table, lengths) for table in tables]


def blocks_case(pool: torch.Tensor, requests: int, keys: int) -> Benchmark:
    inputs = queries(pool, requests, keys)

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_blocks_paged(*arrays, k=BLOCKS, granularity=GRANULARITY)

    def best() -> torch.Tensor:
        return best_blocks(torch_api.indexer_logits_paged(*inputs[0]), inputs[0][-1])

    prepared = cache(lambda i: by_vllm(partial(torch_api.indexer_logits_paged, *inputs[i]), inputs[i][-1]))
    return Benchmark(
        op="indexer_blocks_paged",
        case=f"b={requests} keys={keys} {BLOCKS} of {GRANULARITY}",
        call=call,
        inputs=inputs,
        check=lambda: missed(call(torch_api, *inputs[0]), best()),
        peers={
            WHOLE: lambda i: torch_api.indexer_topk_paged(*inputs[i], k=K),
            VLLM: lambda i: prepared(i)(),
        },
        peer_checks={VLLM: lambda: missed(prepared(0)(), best())},
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

    def by_mask(i: int) -> Callable[[], torch.Tensor]:
        *_, lengths, blocks = inputs[i]
        return by_vllm(partial(torch_api.indexer_logits_paged, *inputs[i][:5]), lengths, blocks)

    prepared = cache(by_mask)
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


def chunk(tokens: int, keys: int) -> tuple[torch.Tensor, ...]:
    """The last `tokens` of a prompt of `keys`."""
    q8, weights = problems.e4m3(tokens, HEADS, DIMS), torch.randn(tokens, HEADS, device=problems.DEVICE)
    k8, scales = problems.e4m3(keys, DIMS), torch.rand(keys, device=problems.DEVICE) + 0.1
    return q8, weights, k8, scales, *problems.causal(tokens, keys)


def ragged_blocks_case(tokens: int, keys: int) -> Benchmark:
    arguments = chunk(tokens, keys)
    ends = arguments[-1]

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_blocks(*arrays, k=BLOCKS, granularity=GRANULARITY)

    def best() -> torch.Tensor:
        return best_blocks(torch_api.indexer_logits(*arguments), ends)

    prepared = cache(lambda: by_vllm(partial(torch_api.indexer_logits, *arguments), ends))
    return Benchmark(
        op="indexer_blocks",
        case=f"s_q={tokens} s_kv={keys} {BLOCKS} of {GRANULARITY}",
        call=call,
        inputs=[arguments],
        check=lambda: missed(call(torch_api, *arguments), best()),
        peers={WHOLE: lambda _: torch_api.indexer_topk(*arguments, k=K), VLLM: lambda _: prepared()()},
        peer_checks={VLLM: lambda: missed(prepared()(), best())},
        flops=2 * int(ends.sum()) * HEADS * DIMS,
        bound="fp8",
    )


def ragged_within_case(tokens: int, keys: int) -> Benchmark:
    """In the blocks of the same queries, whose best keys are those of the whole context."""
    arguments = chunk(tokens, keys)
    ends, blocks = arguments[-1], torch_api.indexer_blocks(*arguments, k=BLOCKS, granularity=GRANULARITY)

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_block_topk(*arrays, k=K, granularity=GRANULARITY)

    def whole(_: int) -> torch.Tensor:
        return torch_api.indexer_topk(*arguments, k=K)

    prepared = cache(lambda: by_vllm(partial(torch_api.indexer_logits, *arguments), ends, blocks, prefill=True))
    return Benchmark(
        op="indexer_block_topk",
        case=f"s_q={tokens} s_kv={keys} k={K} in {BLOCKS} of {GRANULARITY}",
        call=call,
        inputs=[(*arguments, blocks)],
        check=lambda: missed(call(torch_api, *arguments, blocks), whole(0)),
        peers={WHOLE: whole, VLLM: lambda _: prepared()()},
        peer_checks={VLLM: lambda: missed(prepared()(), whole(0))},
        flops=2 * tokens * BLOCKS * GRANULARITY * HEADS * DIMS,
        bound="fp8",
    )


def chunks(case: Callable[[int, int], Benchmark]) -> Iterator[Benchmark]:
    for tokens, keys in RAGGED:
        yield case(tokens, keys)


sources, within = partial(cases, blocks_case), partial(cases, within_case)
ragged_sources, ragged_within = partial(chunks, ragged_blocks_case), partial(chunks, ragged_within_case)
