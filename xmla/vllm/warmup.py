"""Every kernel that steps of an engine launch, compiled before vLLM captures graphs and serves.

The calls are those that `backend`, `attention_v4_base` and `indexer` make, over the caches that the engine has, at the
sizes that its steps may have.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd
from typing import Any

import torch

from xmla._warmup import make_engine_ready
from xmla.core.compile import compiling_allowed
from xmla.core.formats.indexer import indexer_layouts
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V32
from xmla.core.models import memory, selection
from xmla.core.models.base import map_call
from xmla.core.models.calls import Call
from xmla.core.models.steps import around_powers_of_2, full_waves, token_counts
from xmla.core.values import Device, Spec, cdiv
from xmla.torch_api._arrays import device_of, spec_of
from xmla.vllm import shards
from xmla.vllm.indexer import Blocks
from xmla.vllm.pools import LEAST_HEADS
from xmla.vllm.refusals import KEY_DIMS, has_fp4_keys, key_format, pool_size, refuse, unserved, unused


@dataclass(frozen=True, slots=True)
class Sizes:
    """What steps of an engine may have.

    Attributes:
        tokens: Tokens of a step, at most.
        requests: Requests of a step, at most.
        new: Most tokens of a request in a decode.
        max_len: Tokens of a request, at most.
        keys: Keys that a chunk of prefills gathers, at most.
        scratch: Bytes of the indexer's scratch memory, which bounds the logits of a chunk.
        ranks: Of decode context parallelism.
        block: Tokens of a block of vLLM's.
        key_format: The format of the indexer's keys.
    """

    tokens: int
    requests: int
    new: int
    max_len: int
    keys: int
    scratch: int
    ranks: int
    block: int
    key_format: str

    @classmethod
    def of(cls, config: Any) -> "Sizes":
        """Sizes by vLLM's configuration."""
        from vllm import envs
        from vllm.v1.attention.backends.mla.indexer import get_max_prefill_buffer_size

        scheduler, drafts = config.scheduler_config, config.speculative_config
        return cls(
            tokens=scheduler.max_num_batched_tokens,
            requests=scheduler.max_num_seqs,
            new=1 + (0 if drafts is None else drafts.num_speculative_tokens),
            max_len=config.model_config.max_model_len,
            keys=get_max_prefill_buffer_size(config),
            scratch=envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20,
            ranks=config.parallel_config.decode_context_parallel_size,
            block=config.cache_config.block_size,
            key_format="mxfp4" if has_fp4_keys(config) else key_format(),
        )

    def width(self, page: int) -> int:
        """Pages, of so many tokens, in a row of a rank's block table: vLLM makes that a multiple of 128 tokens."""
        block = max(self.block, page)
        multiple = 128 // gcd(128, block)
        return cdiv(cdiv(self.max_len, block * self.ranks), multiple) * multiple * (block // page)

    def at_once(self, columns: int) -> int:
        """Tokens of which ranks exchange candidates at a time, each with logits of so many keys."""
        return self.tokens if self.ranks == 1 else shards.at_once(columns, self.scratch)


def select_calls(
    cache: Spec, heads: int, k: int, ratio: int, sizes: Sizes, device: Device, blocks: Blocks | None = None,
    written: bool = False,
) -> Iterator[Call]:  # fmt: skip
    """Calls of `indexer`, over keys that stand for `ratio` tokens, of all `blocks` if there are such.

    The model has `written` the keys, if not the indexer does.
    """
    (keys,) = indexer_layouts(cache.shape[2], form=sizes.key_format)
    page, form = cache.shape[1], {"cache_format": keys.format}
    if not written:
        inserted = {"keys": Spec((1, keys.dim), "bfloat16"), "slots": Spec((1,), "int64"), "cache": cache}
        yield Call("write_indexer_cache", inserted, form)
    yield Call("split_batch", {"query_starts": Spec((2,), "int32"), "lengths": Spec((1,), "int32")}, {"num_tokens": 1})
    yield Call("read_indexer_cache", {"cache": cache} | selection.of_tokens(1, "slots"), form)
    yield map_call(1, page).with_unaligned()

    topk, whole = {"k": k, "workspace_bytes": sizes.scratch}, sizes.ranks == 1
    if blocks is not None:
        topk["workspace_bytes"] = blocks.scratch(sizes.scratch)
    width = sizes.width(page * ratio)
    columns = width * page
    for new in range(1, sizes.new + 1):
        requests = sizes.requests * (sizes.new if new == 1 else 1)  # vLLM may make a request of each drafted token
        for count in token_counts(device, min(requests, sizes.tokens // new)):
            tokens = min(count * new, sizes.at_once(columns))
            called = selection.paged(tokens, heads, keys.dim, cache, (count, width))
            with_ids = called | selection.of_tokens(tokens, "request_ids")
            if blocks is not None:
                for of_requests in (called, with_ids):
                    yield from block_calls(blocks, "_paged", of_requests, topk | form)
            elif whole:
                yield Call("indexer_topk_paged", called, topk | form)
                yield Call("indexer_topk_paged", with_ids, topk | form)
            else:
                yield Call("indexer_logits_paged", with_ids, form)
                yield from share_calls(selection.of_tokens(tokens, "ends"), columns, k, sizes.ranks)
    vector = () if blocks is None else (4 * blocks.size,)  # rows of a number a block are whole vectors, or not
    for count in full_waves(device, sizes.tokens):
        most = min(sizes.keys, sizes.scratch // (4 * count))
        for columns in around_powers_of_2(most, *vector):
            tokens = min(count, sizes.at_once(columns))
            called = selection.ragged(tokens, heads, columns, keys)
            if blocks is not None:
                yield from block_calls(blocks, "", called, topk)
            if whole:
                yield Call("indexer_topk", called, topk)
            else:
                yield Call("indexer_logits", called, {})
                yield from share_calls(selection.of_tokens(tokens, "starts", "ends"), columns, k, sizes.ranks)


def quantize_calls(cache: Spec, heads: int) -> Iterator[Call]:
    """Calls of `without_e4m3` over the indexer's keys: of each kind of layer, whichever the model has."""
    dim = KEY_DIMS
    keys = {"keys": Spec((1, dim), "float32"), "slots": Spec((1,), "int64"), "cache": cache}
    yield Call("write_indexer_cache", keys, {})
    of_heads = {"scale": dim**-0.5 * heads**-0.5}
    for count, dtype, attrs in (
        (heads, "float32", of_heads),
        (heads, "bfloat16", of_heads),
        (1, "bfloat16", {"scale": 1.0}),
    ):
        queries = {"q": Spec((1, count, dim), dtype), "weights": Spec((1, count), "float32")}
        yield Call("quantize_indexer_query", queries, attrs)


def pool_calls(cache: Spec, heads: int, k: int, pool: int, sizes: Sizes, device: Device) -> Iterator[Call]:
    """Calls of `pools`: the selection of pools, and of the positions in them."""
    gathered = replace(sizes, keys=sizes.keys // pool)
    yield from select_calls(cache, max(heads, LEAST_HEADS), k // pool, pool, gathered, device, written=True)
    selected = {"blocks": Spec((1, k // pool), "int32"), "lengths": Spec((1,), "int32")}
    yield Call("expand_blocks", selected, {"granularity": pool})


def block_calls(blocks: Blocks, paged: str, called: dict[str, Spec], topk: dict[str, Any]) -> Iterator[Call]:
    """Calls that select in blocks and, if this layer is the blocks' source, the blocks before."""
    most, of_blocks = blocks.selected.shape[1], topk | {"granularity": blocks.size}
    if blocks.source:
        yield Call(f"indexer_blocks{paged}", called, of_blocks | {"k": most})
    within = called | {"blocks": Spec((called["q8"].shape[0], most), "int32")}
    yield Call(f"indexer_block_topk{paged}", within, of_blocks)


def share_calls(rows: dict[str, Spec], columns: int, k: int, ranks: int) -> Iterator[Call]:
    """Calls of `shards` after the logits: the selection from this rank's keys, and from what all ranks select."""
    tokens = rows["ends"].shape[0]
    yield Call("select_topk", {"logits": Spec((tokens, columns), "float32")} | rows, {"k": k})
    shape, strides = (ranks, tokens, k), (2 * tokens * k, k, 1)
    candidates = {"values": Spec(shape, "float32", strides), "indices": Spec(shape, "int32", strides)}
    yield Call("merge_topk", candidates, {"k": k})


def attend_calls(impl: Any, cache: Spec, sizes: Sizes, device: Device) -> Iterator[Call]:
    """Calls of `backend`, over its cache and over rows that prefills gather."""
    page, heads, k = cache.shape[1], impl.query_heads, impl.topk_indices_buffer.shape[1]
    attrs = {"softmax_scale": impl.scale, "batch_invariant": impl.invariant}
    rows = impl.layouts[-1]
    strides = (rows.dims, 1) if rows.rope_in_value else None  # one array's columns, of which one row is dense
    projected = (impl.q_lora_rank or 0) + rows.dims  # in whose rows vLLM may rotate
    roped = (strides,) if rows.rope_in_value else (None, (projected, 1))
    for tokens, place in product((1, 2), roped):
        latent, rope = Spec((tokens, rows.latent), "bfloat16", strides), Spec((tokens, rows.rope), "bfloat16", place)
        written = {"latent": latent, "rope": rope, "slots": Spec((tokens,), "int64"), "cache": cache}
        yield Call("write_mla_cache", written, {"scale_floor": "amax"})
    if not device.converts_e4m3 and rows is PLAIN:  # in `without_e4m3`
        values = {"latent": Spec((1, V32.latent), "float32"), "rope": Spec((1, V32.rope), "float32")}
        yield Call("write_mla_cache", values | {"slots": Spec((1,), "int64"), "cache": cache}, {})
    pools = [cache]
    if impl.gathers and cache.dtype == "uint8":
        yield Call("read_mla_cache", {"cache": cache, "slots": Spec((1,), "int32")}, {})
        yield map_call(page, page)
        pools.append(memory.pool(rows, memory.LARGE_POOL, page))
    yield map_call(k, page, compact=impl.compact)
    sink = {} if impl.sinks is None else {"sink": Spec((heads,), "float32")}
    for tokens, pool in product(token_counts(device, sizes.tokens), pools):
        q = Spec((tokens, heads, rows.dims), "bfloat16")
        yield Call("sparse_mla", memory.arguments(q, pool, k) | sink, attrs)


def attend_calls_v4(layer: Any, window: Spec, cache: Spec | None, sizes: Sizes, device: Device) -> Iterator[Call]:
    """Calls of `attention_v4_base`, over the window's cache and that of compressed entries, and over rows of both."""
    sink = {"sink": Spec((layer.padded_heads,), "float32")}
    attrs = {"softmax_scale": layer.scale, "batch_invariant": layer.invariant}
    names = memory.format_names(layer.formats[0], None if cache is None else layer.formats[1])
    pools: list[tuple[Spec, Spec | None, dict[str, Any]]] = [(window, cache, names)]
    if layer.gathers:
        rows = partial(memory.pool, PLAIN_V4, memory.LARGE_POOL)
        pools.append((rows(memory.PAGE), None if cache is None else rows(cache.shape[1]), {}))
        for pool, name in zip(filter(None, (window, cache)), names.values(), strict=True):
            yield Call("read_mla_cache", {"cache": pool, "slots": Spec((1,), "int32")}, {"cache_format": name})
        yield map_call(memory.PAGE, window.shape[1])
        if cache is not None:
            yield map_call(cache.shape[1], cache.shape[1])
    of_pools = product(layer.entry_widths(), token_counts(device, sizes.tokens), pools)
    for width, tokens, (first, second, named) in of_pools:
        q = Spec((tokens, layer.padded_heads, PLAIN_V4.dims), "bfloat16")
        called = memory.arguments(q, first, layer.window_slots, second, width) | sink
        yield Call("sparse_mla", called, attrs | named)
    if cache is not None:
        for width in layer.entry_widths():
            yield map_call(width, cache.shape[1]).with_unaligned()


def indexer_of(layer: Any) -> str | None:
    """The name of the backend of a layer's indexer, if it has one."""
    keys = getattr(getattr(layer, "indexer", None), "k_cache", None)
    return None if keys is None else keys.get_attn_backend().get_name()


def calls(config: Any, device: Device) -> Iterator[Call]:
    """Calls of an engine whose caches are made; layers of a kind have the same, but for where caches lie."""
    sizes, model = Sizes.of(config), config.model_config.hf_text_config
    selected, kpool = (model.index_n_heads, model.index_topk), pool_size(config)
    seen: set[tuple[Any, ...]] = set()

    def is_new(*kind: Any) -> bool:
        return kind not in seen and not seen.add(kind)

    for layer in config.compilation_config.static_forward_context.values():
        attention, cache = getattr(layer, "impl", layer), getattr(layer, "kv_cache", None)
        kind = type(attention).__name__
        pool = spec_of(cache) if isinstance(cache, torch.Tensor) and cache.numel() else None
        if kind in ("XmlaV4Attention", "XmlaV41Attention"):
            window, widths = spec_of(layer.swa_cache_layer.kv_cache), layer.entry_widths()
            entries = spec_of(layer.entry_cache()) if any(widths) else None
            if is_new(kind, window, entries, widths, layer.window_slots):
                yield from attend_calls_v4(layer, window, entries, sizes, device)
        if indexer_of(layer) == "DEEPSEEK_V41_INDEXER":  # whose keys other layers, with other blocks, have too
            keys, blocks = layer.indexer.k_cache, Blocks.of(vars(layer.indexer.indexer_op))
            pool, ratio = spec_of(keys.kv_cache), keys.compress_ratio
            of_blocks = None if blocks is None else (blocks.selected.shape[1], blocks.size, blocks.source)
            if is_new("indexer", pool, ratio, of_blocks):
                yield from select_calls(pool, *selected, ratio, sizes, device, blocks, written=True)
        elif pool is None:  # a layer without a cache
            continue
        elif kind == "XmlaSparseImpl":
            if is_new(kind, pool, attention.sinks is None):
                yield from attend_calls(attention, pool, sizes, device)
        elif layer.get_attn_backend().get_name() in ("DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER"):
            ratio = getattr(layer, "compress_ratio", 1)
            if is_new("indexer", pool, ratio) and kpool == 1:
                yield from select_calls(pool, *selected, ratio, sizes, device, written=ratio > 1)
                if not device.converts_e4m3:
                    yield from quantize_calls(pool, selected[0])
            elif is_new("pools", pool):
                yield from pool_calls(pool, *selected, kpool, sizes, device)


def warm_up_in(worker: Any, prepare: Callable[[Any], None]) -> None:
    """Let vLLM's worker refuse and prepare before it loads weights, and compile before it captures graphs.

    What its memory profile compiles is not refused. `prepare` gets the engine's configuration. Methods are replaced,
    not the class, from which a user's own worker may have been derived before.
    """
    from vllm.logger import init_logger

    log = init_logger("vllm.xmla")
    load, profile, warm_up = worker.load_model, worker.determine_available_memory, worker.compile_or_warm_up_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(unserved(self.vllm_config))
        if (option := unused(self.vllm_config)) is not None:
            log.warning("xmla: %s is not used, the indexer's keys are selected by xmla", option)
        prepare(self.vllm_config)
        return load(self, *args, **kwargs)

    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        with compiling_allowed():  # it captures graphs over small caches
            return profile(self, *args, **kwargs)

    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = device_of(self.device)
        ready = make_engine_ready(calls(self.vllm_config, device), device, self.device.index)
        if ready.specializations:
            log.info("xmla: %d kernels are ready, after %.1f s", len(ready.specializations), ready.seconds)
        return warm_up(self, *args, **kwargs)

    for method in (load_model, determine_available_memory, compile_or_warm_up_model):
        setattr(worker, method.__name__, method)
