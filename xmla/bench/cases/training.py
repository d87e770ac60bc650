"""Training: attention's derivative, the indexer's scores with the selection that they are for, and its loss.

The derivative is over as many plain rows as tokens, beside itself in any order, and cuDNN's and TileLang's if those are
installed. The loss is timed with all of its gradients.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark
from xmla.bench.errors import gradient_error, indexer_loss_error, selection_error
from xmla.torch_api._all_ops import TORCH_OPS

# Heads, dims, keys per token, tokens: fewer heads; then the shapes of cuDNN's backward of sparse attention (V4-Flash,
# V4-Pro, GLM, V3.2). With the most tokens sums exceed the L2 cache, and the last case has more than 2**31 numbers.
SHAPES = (
    *((heads, 576, 2048, tokens) for tokens in (4096, 8192) for heads in (16, 32)),
    *((*shape, tokens) for tokens in (4096, 8192, 32768)
      for shape in ((64, 512, 640), (128, 512, 1152), (64, 576, 2048), (128, 576, 2048))),
)  # fmt: skip
IN_ANY_ORDER = "itself, deterministic=False"


def attention_backward_case(heads: int, dims: int, k: int, tokens: int) -> Benchmark:
    scale = dims**-0.5
    q, dout = problems.bfloat16(tokens, heads, dims), problems.bfloat16(tokens, heads, 512)
    rows, slots = problems.bfloat16(tokens, 1, dims), problems.chosen_keys(tokens, tokens, k)
    out, lse = torch_api.sparse_mla(q, rows, slots, softmax_scale=scale)
    arguments = q, rows, slots, out, lse, dout

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.sparse_mla_backward(*arrays, softmax_scale=scale)

    def in_any_order(_: int = 0) -> Any:
        return TORCH_OPS.sparse_mla_backward(*arguments, softmax_scale=scale, deterministic=False)

    peers: dict[str, Callable[[int], Any]] = {IN_ANY_ORDER: in_any_order}
    peer_checks = {IN_ANY_ORDER: lambda: gradient_error(in_any_order(), arguments, scale)}
    others = {"cuDNN": (baselines.cudnn, baselines.cudnn_backward)}
    others |= {"TileLang": (baselines.tilelang, baselines.tilelang_backward)}
    for name, (installed, backward) in others.items():
        if installed():
            by_other = backward(*arguments, scale)
            peers[name] = lambda _, call=by_other: call()
            peer_checks[name] = lambda call=by_other: gradient_error(call(), arguments, scale)
    return Benchmark(
        op="sparse_mla_backward",
        case=f"h={heads} {dims}/512 k={k} s={tokens}",
        call=call,
        inputs=[arguments],
        check=lambda: gradient_error(call(TORCH_OPS, *arguments), arguments, scale),
        peers=peers,
        peer_checks=peer_checks,
        flops=2 * tokens * heads * k * (3 * dims + 2 * 512),
        bytes=tokens * k * dims * 2,
        bound="bf16",
    )


def attention_backward() -> Iterator[Benchmark]:
    for shape in SHAPES:
        yield attention_backward_case(*shape)


# Tokens, the last of so many keys: sizes for which other projects publish times (benchmarks/log/training.md).
SELECTIONS = ((32768, 32768), (32768, 65536), (32768, 262144))
SELECTING_HEADS, SELECTED = 32, 2048
SCORES_BYTES = 1 << 29  # of the scores that are stored at a time, as in `xmla.megatron`
# Tokens, the last of so many keys, and the keys of each, or None for all before it: the indexer's warm-up.
LOSSES = ((32768, 32768, None), (4096, 131072, None), (32768, 32768, 2048), (32768, 131072, 2048))


def indexer_case(tokens: int, keys: int) -> Benchmark:
    heads, dims = SELECTING_HEADS, 128
    q, k = problems.bfloat16(tokens, heads, dims), problems.bfloat16(keys, dims)
    weights = torch.randn(tokens, heads, device=problems.DEVICE)
    _, ends = problems.causal(tokens, keys)
    arguments = q, k, weights, ends
    count = max(SCORES_BYTES // (4 * keys), 1)

    def call(ops: Any, *arrays: Any) -> Any:
        q, k, weights, ends = arrays
        parts = [slice(first, first + count) for first in range(0, tokens, count)]
        scores = (ops.indexer_scores(q[part], k, weights[part], ends[part]) for part in parts)
        return tuple(ops.select_topk(each, ends[part], k=SELECTED) for each, part in zip(scores, parts, strict=True))

    return Benchmark(
        op="indexer_scores",
        case=f"and select_topk i={heads} s_q={tokens} s_kv={keys} k={SELECTED}",
        call=call,
        inputs=[arguments],
        check=lambda: selection_error(torch.cat(call(TORCH_OPS, *arguments)), arguments, SELECTED),
        flops=2 * int(ends.sum(dtype=torch.int64)) * heads * dims,
        bound="bf16",
    )


def selections() -> Iterator[Benchmark]:
    for shape in SELECTIONS:
        yield indexer_case(*shape)


def indexer_loss_case(
    tokens: int, keys: int, selected: int | None, heads: int = 128, index_heads: int = 64
) -> Benchmark:
    scale, dims, index_dims = 576**-0.5, 576, 128
    index_q, index_k = problems.bfloat16(tokens, index_heads, index_dims), problems.bfloat16(keys, index_dims)
    weights = torch.rand(tokens, index_heads, device=problems.DEVICE) / (index_heads * index_dims**0.5)
    q, rows = problems.bfloat16(tokens, heads, dims), problems.bfloat16(keys, dims)
    _, ends = problems.causal(tokens, keys)
    indices = None if selected is None else problems.chosen_keys(tokens, keys, selected)
    valid = ends if indices is None else (indices < ends[:, None]).sum(1).clamp(min=1)
    # What it is for random queries and rows, whose scores have a deviation of 1.
    lse = (valid.log() + 0.5)[:, None].expand(-1, heads).contiguous()
    arguments = index_q, index_k, weights, q, rows, lse, ends

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.indexer_loss(*arrays, softmax_scale=scale)

    pairs = int((ends if indices is None else valid).sum(dtype=torch.int64))
    return Benchmark(
        op="indexer_loss",
        case=f"h={heads} i={index_heads} s_q={tokens} s_kv={keys} k={selected or 'all'}",
        call=call,
        inputs=[(*arguments, None, indices)],
        check=lambda: indexer_loss_error(call(TORCH_OPS, *arguments, None, indices), arguments, indices, scale),
        # What has to be multiplied: scores, their two gradients, and attention's scores of the target.
        flops=2 * pairs * (3 * index_heads * index_dims + heads * dims),
        bound="bf16",
    )


def indexer_losses() -> Iterator[Benchmark]:
    for shape in LOSSES:
        yield indexer_loss_case(*shape)
