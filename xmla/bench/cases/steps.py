"""Decode steps of V3.2: one layer alone, with its writes, with long block tables; several layers with their writes."""

from collections.abc import Iterator
from itertools import batched
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import problems
from xmla.bench.benchmark import Benchmark
from xmla.bench.cases.attention import SCALE, K
from xmla.bench.errors import step_error
from xmla.core.plan import cdiv

HEADS, INDEX_HEADS = 128, 64


def queries(*tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, index_q and index_weights."""
    return (
        problems.bfloat16(*tokens, HEADS, 576) * 0.3,
        problems.bfloat16(*tokens, INDEX_HEADS, 128),
        torch.randn(*tokens, INDEX_HEADS, device=problems.DEVICE),
    )


def read_by_step(requests: int, keys: int) -> int:
    """Bytes of both caches."""
    return requests * (keys * 132 + K * 656)


def attend(ops: Any, *arrays: Any) -> Any:
    return ops.dsa_attention(*arrays, k=K, softmax_scale=SCALE)[0]


CONTEXT = 32768


def one_layer_case(mla: torch.Tensor, indexer: torch.Tensor, requests: int) -> Benchmark:
    table = problems.block_table(64, CONTEXT)[:requests].contiguous()
    lengths = torch.full((requests,), CONTEXT, device=problems.DEVICE, dtype=torch.int32)
    arguments = *queries(requests), mla, indexer, table, lengths
    return Benchmark(
        op="dsa_attention",
        case=f"b={requests} h={HEADS} context={CONTEXT} k={K}",
        call=attend,
        inputs=[arguments],
        check=lambda: step_error(arguments, K, SCALE),
        bytes=read_by_step(requests, CONTEXT),
    )


def one_layer() -> Iterator[Benchmark]:
    mla, indexer = problems.latent_pool(64 * CONTEXT), problems.indexer_pool(64 * CONTEXT)
    for requests in (1, 64):
        yield one_layer_case(mla, indexer, requests)


def writing_step_case(mla: torch.Tensor, indexer: torch.Tensor, requests: int) -> Benchmark:
    """A layer's step with its writes, in one call and by its three ops."""
    table = problems.block_table(64, CONTEXT)[:requests].contiguous()
    lengths = torch.full((requests,), CONTEXT, device=problems.DEVICE, dtype=torch.int32)
    slots = (table[:, -1] * 64 + 63).contiguous()  # of the last key
    latent, rope, index_k = (problems.bfloat16(requests, dims) for dims in (512, 64, 128))
    attended = *queries(requests), mla, indexer, table, lengths
    arguments = latent, rope, index_k, slots, *attended

    def call(ops: Any, *arrays: Any) -> Any:
        out, _, _, *caches = ops.dsa_step(*arrays, k=K, softmax_scale=SCALE)
        return out, *(caches or arrays[7:9])  # PyTorch updates them in place

    def apart(_: int) -> torch.Tensor:
        torch_api.write_mla_cache(latent, rope, slots, mla)
        torch_api.write_indexer_cache(index_k, slots, indexer)
        return attend(torch_api, *attended)

    def check() -> float:
        out = call(torch_api, *arguments)[0]
        return step_error(attended, K, SCALE) if torch.equal(out, attend(torch_api, *attended)) else float("inf")

    return Benchmark(
        op="dsa_step",
        case=f"b={requests} h={HEADS} context={CONTEXT} k={K}",
        call=call,
        inputs=[arguments],
        updates=(7, 8),
        check=check,
        peers={"its ops apart": apart},
        bytes=read_by_step(requests, CONTEXT),
    )


def writing_step() -> Iterator[Benchmark]:
    mla, indexer = problems.latent_pool(64 * CONTEXT), problems.indexer_pool(64 * CONTEXT)
    for requests in (1, 64):
        yield writing_step_case(mla, indexer, requests)


def long_tables_case(
    mla: torch.Tensor, indexer: torch.Tensor, requests: int, context: int, narrow: int, wide: int
) -> Benchmark:
    short = problems.block_table(64, narrow)[:requests].contiguous()
    long = torch.full((requests, wide // 64), -1, device=problems.DEVICE, dtype=torch.int32)
    long[:, : short.shape[1]] = short
    lengths = torch.full((requests,), context, device=problems.DEVICE, dtype=torch.int32)
    arrays = *queries(requests), mla, indexer
    return Benchmark(
        op="dsa_attention",
        case=f"b={requests} h={HEADS} context={context} max_len={wide}",
        call=attend,
        inputs=[(*arrays, long, lengths)],
        check=lambda: step_error((*arrays, long, lengths), K, SCALE),
        peers={f"itself at max_len={narrow}": lambda _: attend(torch_api, *arrays, short, lengths)},
        bytes=read_by_step(requests, context),
    )


def long_tables() -> Iterator[Benchmark]:
    """A step at 28K keys with block tables made for 1M and for 32K: time follows the keys."""
    narrow = 32768
    mla, indexer = problems.latent_pool(64 * narrow), problems.indexer_pool(64 * narrow)
    for requests in (1, 64):
        yield long_tables_case(mla, indexer, requests, 28672, narrow, 1 << 20)


LAYERS = 8


def step(ops: Any, table: Any, lengths: Any, slots: Any, *arrays: Any) -> tuple[Any, ...]:
    """A step of several layers, each of which writes its keys and attends; its query adds the last layer's output.

    `arrays` are q of every layer, then index_q of every layer, index_weights, latent, rope, index_k and both caches.
    Returns the layers' outputs, then their caches.
    """
    outputs, mla, indexer = [], [], []
    for q, index_q, index_weights, latent, rope, index_k, *caches in zip(*batched(arrays, LAYERS), strict=True):
        # PyTorch writes in place and returns nothing.
        written = ops.write_mla_cache(latent, rope, slots, caches[0])
        mla.append(caches[0] if written is None else written)
        written = ops.write_indexer_cache(index_k, slots, caches[1])
        indexer.append(caches[1] if written is None else written)
        query = q + outputs[-1][..., :1] if outputs else q
        outputs.append(attend(ops, query, index_q, index_weights, mla[-1], indexer[-1], table, lengths))
    return *outputs, *mla, *indexer


def layers_case(requests: int, context: int) -> Benchmark:
    pages = cdiv(context, 64)
    table = problems.block_table(requests, pages * 64)
    lengths = torch.full((requests,), context, device=problems.DEVICE, dtype=torch.int32)
    written = context - 1  # the step's position
    slots = (table[:, written // 64] * 64 + written % 64).to(torch.int32)
    q, index_q, index_weights = zip(*(queries(requests) for _ in range(LAYERS)), strict=True)
    keys = [problems.bfloat16(requests, dims) for dims in (512, 64, 128) for _ in range(LAYERS)]
    mla = [problems.latent_pool(requests * pages * 64) for _ in range(LAYERS)]
    indexer = [problems.indexer_pool(requests * pages * 64) for _ in range(LAYERS)]
    arrays = table, lengths, slots, *q, *index_q, *index_weights, *keys, *mla, *indexer

    def check() -> float:
        """Of the last layer, whose query follows from the others."""
        *_, before, last = step(torch_api, *arrays)[:LAYERS]
        arguments = q[-1] + before[..., :1], index_q[-1], index_weights[-1], mla[-1], indexer[-1], table, lengths
        if not torch.equal(attend(torch_api, *arguments), last):
            return float("inf")
        return step_error(arguments, K, SCALE)

    return Benchmark(
        op="dsa_attention",
        case=f"step of {LAYERS} layers b={requests} h={HEADS} context={context} k={K}",
        call=step,
        inputs=[arrays],
        updates=tuple(range(len(arrays) - 2 * LAYERS, len(arrays))),
        check=check,
        bytes=LAYERS * read_by_step(requests, context),
    )


def layers() -> Iterator[Benchmark]:
    for requests, context in ((1, 32768), (8, 32768), (64, 8192)):
        yield layers_case(requests, context)
