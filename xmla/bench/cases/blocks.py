"""Selections in blocks as DeepSeek-V4.1 has them: the blocks of its source layer, and the keys of a layer within them.

Of steps of decode and of chunks of prefill. Peers are the selection over the whole context, and vLLM's kernels for
blocks over the same logits, of all keys. To the keys of a layer the first is another way to the same result. To the
blocks it is what a layer without blocks does, and less work: from the same logits it selects 512 keys, where the source
layer takes the largest of each block and selects 2048 of these. A ratio below 1 is the price of blocks.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark, rotation
from xmla.torch_api._all_ops import TORCH_OPS

HEADS, DIMS, K, BLOCKS, GRANULARITY = 32, 128, 512, 2048, 8
WITHIN = BLOCKS * GRANULARITY  # keys that a token reads in its blocks
Arrays = tuple[torch.Tensor, ...]
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
    """Best blocks of each row by `torch.topk`, of logits [T, N] that are −∞ from the row's end on."""
    best = logits.view(len(logits), -1, GRANULARITY).amax(2)
    best[torch.arange(len(best), device=best.device), (ends.long() - 1) // GRANULARITY] = torch.inf
    return best.topk(BLOCKS).indices


def source_case(paged: str, sizes: str, inputs: list[Arrays], **work: Any) -> Benchmark:
    """A case that selects blocks: over pages if `paged` is the ops' suffix for them, else over dense keys."""
    score, over_all = (getattr(torch_api, f"indexer_{name}{paged}") for name in ("logits", "topk"))

    def call(ops: Any, *arrays: Any) -> Any:
        return getattr(ops, f"indexer_blocks{paged}")(*arrays, k=BLOCKS, granularity=GRANULARITY)

    def best() -> torch.Tensor:
        return best_blocks(score(*inputs[0]), inputs[0][-1])

    prepared = cache(lambda i: by_vllm(partial(score, *inputs[i]), inputs[i][-1]))
    return Benchmark(
        op=f"indexer_blocks{paged}",
        case=f"{sizes} {BLOCKS} of {GRANULARITY}",
        call=call,
        inputs=inputs,
        check=lambda: missed(call(TORCH_OPS, *inputs[0]), best()),
        peers={WHOLE: lambda i: over_all(*inputs[i], k=K), VLLM: lambda i: prepared(i)()},
        peer_checks={VLLM: lambda: missed(prepared(0)(), best())},
        **work,
    )


def within_case(paged: str, sizes: str, inputs: list[Arrays], **work: Any) -> Benchmark:
    """A case that selects keys in the blocks of the same queries, whose best keys are those of the whole context."""
    score, over_all, select = (getattr(torch_api, f"indexer_{name}{paged}") for name in ("logits", "topk", "blocks"))
    blocks = [select(*arrays, k=BLOCKS, granularity=GRANULARITY) for arrays in inputs]

    def call(ops: Any, *arrays: Any) -> Any:
        return getattr(ops, f"indexer_block_topk{paged}")(*arrays, k=K, granularity=GRANULARITY)

    def whole(i: int) -> torch.Tensor:
        return over_all(*inputs[i], k=K)

    prepared = cache(lambda i: by_vllm(partial(score, *inputs[i]), inputs[i][-1], blocks[i], prefill=not paged))
    return Benchmark(
        op=f"indexer_block_topk{paged}",
        case=f"{sizes} k={K} in {BLOCKS} of {GRANULARITY}",
        call=call,
        inputs=[(*arrays, selected) for arrays, selected in zip(inputs, blocks, strict=True)],
        check=lambda: missed(call(TORCH_OPS, *inputs[0], blocks[0]), whole(0)),
        peers={WHOLE: whole, VLLM: lambda i: prepared(i)()},
        peer_checks={VLLM: lambda: missed(prepared(0)(), whole(0))},
        **work,
    )


def steps(case: Callable[..., Benchmark], keys_a_token: int | None = None) -> Iterator[Benchmark]:
    """Cases of decode, one token a request; each token reads all keys of its request, or `keys_a_token`."""
    pool = problems.indexer_pool(max(requests * keys for requests, keys in PAGED))
    for requests, keys in PAGED:
        q8, weights = problems.e4m3(requests, HEADS, DIMS), torch.randn(requests, HEADS, device=problems.DEVICE)
        tables = problems.shuffled(problems.block_table(requests, keys), rotation(requests * WITHIN * 132))
        lengths = torch.full((requests,), keys, device=problems.DEVICE, dtype=torch.int32)
        inputs = [(q8, weights, pool, table, lengths) for table in tables]
        read = requests * (keys_a_token or keys)
        work = {"flops": 2 * read * HEADS * DIMS, "bytes": read * 132}
        yield case("_paged", f"b={requests} keys={keys}", inputs, **work)


def chunks(case: Callable[..., Benchmark], keys_a_token: int | None = None) -> Iterator[Benchmark]:
    """Cases of prefill, over the last tokens of a prompt."""
    for tokens, keys in RAGGED:
        q8, weights = problems.e4m3(tokens, HEADS, DIMS), torch.randn(tokens, HEADS, device=problems.DEVICE)
        k8, scales = problems.e4m3(keys, DIMS), torch.rand(keys, device=problems.DEVICE) + 0.1
        starts, ends = problems.causal(tokens, keys)
        products = tokens * keys_a_token if keys_a_token else int(ends.sum())
        inputs = [(q8, weights, k8, scales, starts, ends)]
        yield case("", f"s_q={tokens} s_kv={keys}", inputs, flops=2 * products * HEADS * DIMS, bound="fp8")


sources, within = partial(steps, source_case), partial(steps, within_case, WITHIN)
ragged_sources, ragged_within = partial(chunks, source_case), partial(chunks, within_case, WITHIN)
