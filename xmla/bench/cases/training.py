"""Attention's derivative, over as many plain rows as tokens, beside itself in any order and cuDNN's if installed."""

from collections.abc import Callable, Iterator
from typing import Any

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark
from xmla.bench.errors import gradient_error

# Heads, dims, keys per token, tokens: fewer heads; then the shapes of cuDNN's backward of sparse attention (V4-Flash,
# V4-Pro, GLM, V3.2). With the most tokens sums exceed the L2 cache, and the last case has more than 2**31 numbers.
SHAPES = (
    (16, 576, 2048, 4096), (32, 576, 2048, 4096),
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
        return torch_api.sparse_mla_backward(*arguments, softmax_scale=scale, deterministic=False)

    peers: dict[str, Callable[[int], Any]] = {IN_ANY_ORDER: in_any_order}
    peer_checks = {IN_ANY_ORDER: lambda: gradient_error(in_any_order(), arguments, scale)}
    if baselines.cudnn():
        by_cudnn = baselines.cudnn_backward(*arguments, scale)
        peers["cuDNN"] = lambda _: by_cudnn()
        peer_checks["cuDNN"] = lambda: gradient_error(by_cudnn(), arguments, scale)
    return Benchmark(
        op="sparse_mla_backward",
        case=f"h={heads} {dims}/512 k={k} s={tokens}",
        call=call,
        inputs=[arguments],
        check=lambda: gradient_error(call(torch_api, *arguments), arguments, scale),
        peers=peers,
        peer_checks=peer_checks,
        flops=2 * tokens * heads * k * (3 * dims + 2 * 512),
        bytes=tokens * k * dims * 2,
        bound="bf16",
    )


def attention_backward() -> Iterator[Benchmark]:
    for shape in SHAPES:
        yield attention_backward_case(*shape)
