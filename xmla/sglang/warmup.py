"""Every kernel that steps of SGLang launch of xmla's, compiled before SGLang captures graphs and serves.

The calls are those that `attention`, `indexer` and, for SGLang's indexer, `xmla.compat.deep_gemm` make, over the pool
that a runner has, at the sizes that its steps may have.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from xmla._warmup import make_engine_ready
from xmla.compat.deep_gemm import row_stride
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.models import memory, selection
from xmla.core.models.base import map_call
from xmla.core.models.calls import Call
from xmla.core.models.steps import around_powers_of_2, full_waves, token_counts
from xmla.core.values import Device, Spec, cdiv
from xmla.sglang.attention import FORMATS, SERVED
from xmla.torch_api._arrays import device_of, spec_of

LEAST_HEADS = 32  # SGLang pads an indexer of fewer heads in prefills


@dataclass(frozen=True, slots=True)
class Sizes:
    """What steps of an engine may have.

    Attributes:
        tokens: Tokens of a step, at most.
        requests: Requests of a decode, at most.
        new: Tokens of a request in a decode: 1, or those that a step verifies.
        pages: Pages of a request, at most.
        keys: Keys of a prefill's requests, at most.
    """

    tokens: int
    requests: int
    new: int
    pages: int
    keys: int

    @classmethod
    def of(cls, runner: Any, page: int) -> "Sizes":
        """Sizes by SGLang's `ModelRunner`, whose pools are made."""
        from sglang.srt.runtime_context import get_spec

        requests, positions = runner.req_to_token_pool.size, runner.req_to_token_pool.req_to_token.shape[1]
        new = get_spec().speculative_num_draft_tokens or 1
        return cls(
            tokens=most_tokens(positions) + requests * new,  # --enable-mixed-chunk has both in a step
            requests=requests,
            new=new,
            pages=cdiv(positions, page),
            keys=runner.max_total_num_tokens,
        )


def most_tokens(context: int) -> int:
    """The most tokens of a prefill: a chunk's or, if requests of so many tokens are not divided, such a request's."""
    from sglang.srt.runtime_context import get_schedule

    chunk = get_schedule().chunked_prefill_size
    return chunk if chunk is not None and chunk > 0 else max(get_schedule().max_prefill_tokens, context)


def paged_logits(pool: Spec, heads: int, requests: int, width: int, new: int = 1) -> Call:
    """Logits over the pool [P, R, 132], of `new` tokens of each request, with a table of `width` pages."""
    called = selection.paged(requests * new, heads, pool.shape[2] - 4, pool, (requests, width))
    return Call("indexer_logits_paged", called, {"max_len": row_stride(width * pool.shape[1])})


def ragged_logits(tokens: int, columns: int, heads: int, dim: int) -> Call:
    """Logits over gathered keys."""
    called = selection.ragged(tokens, heads, row_stride(columns), IndexerLayout(dim))
    return Call("indexer_logits", called, {}).with_unaligned()


def select(tokens: int, columns: int, k: int, *more: str) -> Call:
    """The selection from logits, which are rows of a wider array."""
    logits = {"logits": Spec((tokens, columns), "float32", (row_stride(columns), 1))}
    return Call("select_topk", logits | selection.of_tokens(tokens, "ends", *more), {"k": k})


def select_calls(pool: Spec, heads: int, k: int, sizes: Sizes, device: Device) -> Iterator[Call]:
    """Calls of SGLang's indexer over its pool [P, R, 132]."""
    page, dim = pool.shape[1], pool.shape[2] - 4
    yield map_call(k, page, request_ids=False)
    yield map_call(k, page).with_unaligned()
    for new, width in product(sorted({1, sizes.new}), around_powers_of_2(sizes.pages)):
        most = sizes.requests * (sizes.new if new == 1 else 1)  # drafted tokens as requests, or a request's in one call
        for count in token_counts(device, most) if width == sizes.pages else full_waves(device, most):
            call = paged_logits(pool, heads, count, width, new)
            # SGLang splits requests by the number of multiprocessors.
            yield call.with_unaligned() if device.num_sms % 4 else call
            yield select(count * new, width * page, k)
    for tokens in full_waves(device, sizes.tokens):  # of prompts with at most k keys, of zeros in place of logits
        zeros = Spec((tokens, k), "float32")
        yield Call("select_topk", {"logits": zeros} | selection.of_tokens(tokens, "ends"), {"k": k})
    for tokens, columns in product(full_waves(device, sizes.tokens), around_powers_of_2(sizes.keys)):
        yield ragged_logits(tokens, columns, max(heads, LEAST_HEADS), dim)
        yield select(tokens, columns, k, "starts").with_unaligned()


def attend_calls(
    backend: Any, layer: Any, pool: Spec, sizes: Sizes, device: Device, sinks: bool = False
) -> Iterator[Call]:  # fmt: skip
    """Calls of `attention` in this layer over the pool [slots, 1, row], and over rows that SGLang gathers of it."""
    packed, k, dims = backend.dsa_kv_cache_store_fp8, backend.dsa_index_topk, layer.head_dim
    served = {backend.dsa_prefill_impl, backend.dsa_decode_impl} & {*SERVED}
    pools: list[tuple[Spec, str | None]] = []
    if served - {"flashmla_sparse"}:
        pages = pool.shape[0] // backend.physical_page_size, backend.physical_page_size, pool.shape[2]
        pools.append((Spec(pages, pool.dtype), FORMATS[backend.flashmla_kv_format] if packed else None))
    if served - {"flashmla_kv"}:
        pools.append((pool, None))
        if packed:
            pools.append((Spec((sizes.keys, 1, dims), "bfloat16"), None))  # its plans follow no number of rows
    for tokens, (cache, cache_format) in product(token_counts(device, sizes.tokens), pools):
        q = Spec((tokens, layer.tp_q_head_num, dims), "bfloat16")
        sink = {"sink": Spec(q.shape[1:2], "float32")} if sinks else {}
        called = memory.arguments(q, cache, k) | sink
        without = {name: spec for name, spec in called.items() if name != "lengths"}  # SGLang may pad tokens
        for specs in (called, without):
            yield Call("sparse_mla", specs, {"softmax_scale": layer.scaling, "cache_format": cache_format})


def calls(backend: Any, runner: Any, device: Device) -> Iterator[Call]:
    """Calls of an engine whose pool is made; layers have the same, also the one that drafts."""
    from sglang.srt.layers.radix_attention import RadixAttention

    pool = runner.token_to_kv_pool
    first, page = pool.start_layer, pool.index_page_size
    sizes, keys = Sizes.of(runner, page), pool.get_index_k_with_scale_buffer(first)
    heads, k = runner.model_config.hf_config.index_n_heads, backend.dsa_index_topk
    yield from select_calls(Spec((len(keys), page, keys.shape[1] // page), "uint8"), heads, k, sizes, device)
    layers = (layer for layer in runner.model.modules() if isinstance(layer, RadixAttention))
    absorbed = (layer for layer in layers if layer.v_head_dim == backend.kv_lora_rank)
    sinks = any(hasattr(module, "learnable_sink_param") for module in runner.model.modules())  # Hy4's, in every layer
    for layer in {(each.tp_q_head_num, each.head_dim, each.scaling): each for each in absorbed}.values():
        yield from attend_calls(backend, layer, spec_of(pool.get_key_buffer(first)), sizes, device, sinks)


def warm(_: None, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After `DeepseekSparseAttnBackend.__init__`: pools are made, and graphs are not yet captured."""
    make_ready(lambda device: calls(backend, model_runner, device), model_runner)


def make_ready(calls: Callable[[Device], Iterator[Call]], runner: Any) -> None:
    """Compile what these calls launch on the runner's GPU; a runner that drafts has the kernels of the model's."""
    if runner.is_draft_worker:
        return
    device = device_of(torch.device(f"cuda:{runner.gpu_id}"))
    ready = make_engine_ready(calls(device), device, runner.gpu_id)
    log = logging.getLogger(__name__)
    log.info("xmla: %d kernels are ready, after %.1f s", len(ready.specializations), ready.seconds)
