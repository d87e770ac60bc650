"""Decode steps of V3.2: one layer alone, with its writes, with long block tables; several layers with their writes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import problems
from xmla.bench.benchmark import Benchmark
from xmla.bench.cases.attention import SCALE, K
from xmla.bench.errors import step_error
from xmla.core.values import cdiv
from xmla.torch_api._all_ops import TORCH_OPS

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
        return attend(TORCH_OPS, *attended)

    def check() -> float:
        out = call(TORCH_OPS, *arguments)[0]
        return step_error(attended, K, SCALE) if torch.equal(out, attend(TORCH_OPS, *attended)) else float("inf")

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
        peers={f"itself at max_len={narrow}": lambda _: attend(TORCH_OPS, *arrays, short, lengths)},
        bytes=read_by_step(requests, context),
    )


def long_tables() -> Iterator[Benchmark]:
    """A step at 28K keys with block tables made for 1M and for 32K: time follows the keys."""
    narrow = 32768
    mla, indexer = problems.latent_pool(64 * narrow), problems.indexer_pool(64 * narrow)
    for requests in (1, 64):
        yield long_tables_case(mla, indexer, requests, 28672, narrow, 1 << 20)


LAYERS = 8


def layer(ops: Any, out: Any, operands: Any, caches: Any, table: Any, lengths: Any, slots: Any) -> tuple[Any, ...]:
    """A layer writes its keys and attends; its query adds the last layer's output. Returns its own, and its caches."""
    q, index_q, index_weights, latent, rope, index_k = operands
    mla, indexer = caches
    written = ops.write_mla_cache(latent, rope, slots, mla)
    mla = mla if written is None else written  # PyTorch writes in place and returns nothing
    written = ops.write_indexer_cache(index_k, slots, indexer)
    indexer = indexer if written is None else written
    query = q if out is None else q + out[..., :1]
    return attend(ops, query, index_q, index_weights, mla, indexer, table, lengths), mla, indexer


def layer_by_dsa_step(
    ops: Any, out: Any, operands: Any, caches: Any, table: Any, lengths: Any, slots: Any
) -> tuple[Any, ...]:
    """A layer's step as one call of `dsa_step`."""
    q, index_q, index_weights, latent, rope, index_k = operands
    query = q if out is None else q + out[..., :1]
    out, _, _, *written = ops.dsa_step(
        latent, rope, index_k, slots, query, index_q, index_weights, *caches, table, lengths, k=K, softmax_scale=SCALE
    )
    return out, *(written or caches)


def apart(ops: Any, table: Any, lengths: Any, slots: Any, *arrays: Any) -> tuple[Any, ...]:
    """A step of several layers; `arrays` are q of every layer, then index_q of every layer, … and both caches."""
    outputs, mla, indexer = [], [], []
    for *operands, cache, keys in zip(*batched(arrays, LAYERS), strict=True):
        before = outputs[-1] if outputs else None
        out, cache, keys = layer(ops, before, operands, (cache, keys), table, lengths, slots)
        outputs.append(out)
        mla.append(cache)
        indexer.append(keys)
    return *outputs, *mla, *indexer


def stacked(ops: Any, table: Any, lengths: Any, slots: Any, *arrays: Any) -> tuple[Any, ...]:
    """A step over stacks [LAYERS, …] of what is read, and a list of each cache. Returns the last output alone."""
    operands, caches, out = arrays[:6], list(zip(*batched(arrays[6:], LAYERS), strict=True)), None
    for index, pair in enumerate(caches):
        out, *written = layer(ops, out, [stack[index] for stack in operands], pair, table, lengths, slots)
        caches[index] = tuple(written)
    return out, *(cache for kind in zip(*caches, strict=True) for cache in kind)


def of_each_layer(ops: Any, table: Any, slots: Any, pages: int) -> tuple[Any, Any]:
    """The tables and slots of all layers, whose pages follow one another in one array of caches."""
    if ops is TORCH_OPS:
        first = torch.arange(LAYERS, device=table.device, dtype=torch.int32) * pages
    else:
        import jax.numpy as jnp

        first = jnp.arange(LAYERS, dtype=jnp.int32) * pages
    return table[None] + first[:, None, None], slots[None] + first[:, None] * 64


def in_one_array(
    ops: Any, table: Any, lengths: Any, slots: Any, *arrays: Any, one_layer: Callable[..., Any] = layer
) -> tuple[Any, ...]:
    """A step with all layers' caches as one array of each kind, [LAYERS · P, R, …]."""
    *operands, mla, indexer = arrays
    tables, layer_slots = of_each_layer(ops, table, slots, mla.shape[0] // LAYERS)
    out = None
    for index in range(LAYERS):
        parts = [stack[index] for stack in operands]
        out, mla, indexer = one_layer(ops, out, parts, (mla, indexer), tables[index], lengths, layer_slots[index])
    return out, mla, indexer


def scanned(ops: Any, table: Any, lengths: Any, slots: Any, *arrays: Any) -> tuple[Any, ...]:
    """A step as a `jax.lax.scan` over layers, whose carry has the caches. PyTorch has Python's loop."""
    if ops is TORCH_OPS:
        return in_one_array(ops, table, lengths, slots, *arrays)
    import jax

    *operands, mla, indexer = arrays
    tables, layer_slots = of_each_layer(ops, table, slots, mla.shape[0] // LAYERS)

    def body(carry: Any, parts: Any) -> tuple[Any, None]:
        out, *caches = carry
        *operands, table, slots = parts
        return layer(ops, out, operands, caches, table, lengths, slots), None

    before = jax.numpy.zeros((*operands[0].shape[1:-1], 512), operands[0].dtype)
    return jax.lax.scan(body, (before, mla, indexer), (*operands, tables, layer_slots))[0]


@dataclass(frozen=True, slots=True)
class Form:
    """How the arrays of a step's layers are passed.

    Attributes:
        call: The step.
        stacks: Each array that is read is one for all layers, and the step returns the last output alone.
        one_cache: So is each cache.
    """

    call: Callable[..., Any]
    stacks: bool = True
    one_cache: bool = True


FORMS = {
    "": Form(apart, stacks=False, one_cache=False),
    ", stacks": Form(stacked, one_cache=False),
    ", one array of caches": Form(in_one_array),
    ", dsa_step": Form(partial(in_one_array, one_layer=layer_by_dsa_step)),
    ", scan": Form(scanned),
}


def layers_case(requests: int, context: int, name: str = "") -> Benchmark:
    form, pages = FORMS[name], cdiv(context, 64)
    table = problems.block_table(requests, pages * 64)
    lengths = torch.full((requests,), context, device=problems.DEVICE, dtype=torch.int32)
    written = context - 1  # the step's position
    slots = (table[:, written // 64] * 64 + written % 64).to(torch.int32)
    operands = [list(each) for each in zip(*(queries(requests) for _ in range(LAYERS)), strict=True)]
    operands += [[problems.bfloat16(requests, dims) for _ in range(LAYERS)] for dims in (512, 64, 128)]
    arrays_of_cache, layers_of_array = (1, LAYERS) if form.one_cache else (LAYERS, 1)
    entries = layers_of_array * requests * pages * 64
    pools = (problems.latent_pool, problems.indexer_pool)
    caches = [make(entries) for make in pools for _ in range(arrays_of_cache)]
    read = [torch.stack(each) for each in operands] if form.stacks else [array for each in operands for array in each]
    arrays = table, lengths, slots, *read, *caches

    def check() -> float:
        """Error of the last layer's output, which also has to be that of `apart`, with arrays of each layer's own."""
        last = form.call(TORCH_OPS, *arrays)[0 if form.stacks else LAYERS - 1]
        own = [part for cache in caches for part in cache.chunk(layers_of_array)]
        results = apart(TORCH_OPS, *arrays[:3], *(array for each in operands for array in each), *own)
        before, same = results[LAYERS - 2 : LAYERS]
        if not torch.equal(last, same):
            return float("inf")
        q, index_q, index_weights, *_ = (each[-1] for each in operands)
        arguments = q + before[..., :1], index_q, index_weights, own[LAYERS - 1], own[-1], table, lengths
        return step_error(arguments, K, SCALE) if torch.equal(attend(TORCH_OPS, *arguments), last) else float("inf")

    return Benchmark(
        op="dsa_attention",
        case=f"step of {LAYERS} layers b={requests} h={HEADS} context={context} k={K}{name}",
        call=form.call,
        inputs=[arrays],
        updates=tuple(range(len(arrays) - len(caches), len(arrays))),
        check=check,
        bytes=LAYERS * read_by_step(requests, context),
    )


def layers() -> Iterator[Benchmark]:
    for requests, context in ((1, 32768), (8, 32768), (64, 8192)):
        for name in FORMS:
            yield layers_case(requests, context, name)
