"""Every kernel that steps of DeepSeek-V4 launch of xmla's, as `warmup` has V3.2's.

The calls are those that `attention_v4` and `indexer_v4` make, over the pools that a runner has.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from xmla.core.formats.mla import PLAIN_V4
from xmla.core.models import memory
from xmla.core.models.base import map_call
from xmla.core.models.calls import Call
from xmla.core.models.steps import SPLIT_TOKENS, around_powers_of_2, full_waves, token_counts
from xmla.core.values import Device, Spec, cdiv
from xmla.sglang.warmup import Sizes, make_ready, most_tokens, paged_logits, ragged_logits, select
from xmla.torch_api._arrays import device_of, spec_of

PAGE = 256  # tokens, on which SGLang insists
WINDOW = 128
ALL = 128  # tokens of an entry in layers that attend to all entries
# SGLang pads slots of a pool to multiples of the first, rows of both pools together to multiples of the second.
SLOTS, ROWS = 64, 128


def padded(keys: int, multiple: int) -> int:
    return cdiv(keys, multiple) * multiple


def slots_of_all(pages: int) -> int:
    """Slots of the entries of layers that attend to all, in a request of so many pages."""
    return padded(pages * (PAGE // ALL), SLOTS)


def widths_of_rows(ratio: int, k: int, pages: int) -> list[int]:
    """Rows for a token in a prefill: its window's and its entries', of which a prompt has few or many."""
    if ratio == 0:
        return [WINDOW]
    if ratio != ALL:
        return [padded(padded(k, SLOTS) + WINDOW, ROWS)]
    return [ROWS * (n + 1) for n in around_powers_of_2(cdiv(pages * PAGE, ALL * ROWS))]


def widths_of_entries(ratio: int, k: int, pages: int) -> list[int]:
    """Slots for a token in the pool of compressed entries: of decodes, or of prefills that do not gather too."""
    from sglang.srt.environ import envs

    if ratio == 0:
        return [0]
    if ratio != ALL:
        return [padded(k, SLOTS)]
    gathered = envs.SGLANG_OPT_FLASHMLA_SPARSE_PREFILL.get()
    return [slots_of_all(n) for n in ([pages] if gathered else around_powers_of_2(pages))]


def select_calls(pool: Spec, heads: int, k: int, sizes: Sizes, device: Device) -> Iterator[Call]:
    """Calls of SGLang's indexer over its pool [P, R, 132], with a row of the page table for each token."""
    page, dim = pool.shape[1], pool.shape[2] - 4
    yield map_call(k, page, request_ids=False).with_unaligned()
    for width in around_powers_of_2(sizes.pages):
        for tokens in (token_counts if width == sizes.pages else full_waves)(device, sizes.tokens):
            # SGLang divides a step's rows by the memory of their logits.
            yield paged_logits(pool, heads, tokens, width).with_unaligned()
            yield select(tokens, width * page, k).with_unaligned()
    for tokens, columns in product(full_waves(device, sizes.tokens), around_powers_of_2(sizes.pages * page)):
        yield ragged_logits(tokens, columns, heads, dim)
        yield select(tokens, columns, k).with_unaligned()


def attend_calls(
    window: Spec, entries: dict[int, Spec], heads: int, scale: float, k: int, sizes: Sizes, device: Device
) -> Iterator[Call]:
    """Calls of attention in layers of each ratio: over both pools, and over rows [N, 1, 512] of them.

    Args:
        window: The pool of the window [P, R, 584].
        entries: Pools of compressed entries by how many tokens each is of.
    """
    rows = memory.pool(PLAIN_V4, memory.LARGE_POOL, 1)  # plans follow no number of rows
    sources: list[tuple[Spec, int, Spec | None, int]] = []
    for ratio, pool in {0: None, **entries}.items():
        sources += [(window, WINDOW, pool, width) for width in widths_of_entries(ratio, k, sizes.pages)]
        sources += [(rows, width, None, 0) for width in widths_of_rows(ratio, k, sizes.pages)]
    for (cache, keys, extra, width), tokens in product(sources, token_counts(device, sizes.tokens)):
        q = Spec((tokens, heads, PLAIN_V4.dims), "bfloat16")
        specs = memory.arguments(q, cache, keys, extra, width) | {"sink": Spec((heads,), "float32")}
        attrs = {"softmax_scale": scale}
        yield Call("sparse_mla", specs, attrs if cache is rows else attrs | {"empty_lse": "+inf"})


def entries_of(pool: Any) -> Spec:
    """The spec of SGLang's pool of a layer's entries, as its backend views it."""
    buffer, page, row = pool.get_key_buffer(pool.start_layer), pool.page_size, pool.kv_cache_total_dim
    return spec_of(buffer[:, : page * row].view(len(buffer), page, row))


def calls(backend: Any, runner: Any, device: Device) -> Iterator[Call]:
    """Calls of an engine whose pools are made; layers of a ratio have the same, also the one that drafts."""
    from sglang.srt.runtime_context import get_parallel

    pool, config = runner.token_to_kv_pool, runner.model_config
    sizes, k = Sizes.of(runner, PAGE), backend.index_topk
    for ratio, index in pool.index_pools.items():
        if ratio in pool.present_ratios and index.layer_num:
            keys = index.get_index_k_with_scale_buffer(0)
            spec = Spec((len(keys), index.page_size, keys.shape[1] // index.page_size), "uint8")
            yield from select_calls(spec, config.hf_text_config.index_n_heads, k, sizes, device)
    entries = {ratio: pool.kv_pools[ratio] for ratio in pool.present_ratios}
    heads = config.num_attention_heads // get_parallel().attn_tp_size
    yield from attend_calls(
        entries_of(pool.swa_kv_pool), {ratio: entries_of(each) for ratio, each in entries.items() if each.layer_num},
        heads, backend.softmax_scale, k, sizes, device,
    )  # fmt: skip


def warm(_: None, backend: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After `DeepseekV4AttnBackend.__init__`: pools are made, and graphs are not yet captured."""
    make_ready(lambda device: calls(backend, model_runner, device), model_runner)


@lru_cache
def scratch(heads: int, k: int, pages: int, tokens: int, device: Device) -> int:
    """Bytes that attention needs at most in a step of so many tokens, of requests of so many pages."""
    widths = 0, padded(k, SLOTS), slots_of_all(pages)
    most = max(widths_of_rows(ALL, k, pages))
    of_rows = (
        memory.attention(PLAIN_V4, heads, most, count, memory.LARGE_POOL)
        for count in range(1, min(tokens, SPLIT_TOKENS) + 1)
    )
    pools = memory.scratch_v4(heads, WINDOW, widths, tokens, device)
    return max(pools, *(call.plan(device).workspace_bytes for call in of_rows))


def scratch_of(config: Any, gpu: int) -> int:
    """Bytes that attention needs at most on a rank, by SGLang's `ModelConfig`, before a model's pools are made."""
    from sglang.srt.runtime_context import get_parallel

    heads, k = config.num_attention_heads // get_parallel().attn_tp_size, config.hf_text_config.index_topk
    tokens, pages = most_tokens(config.context_len), cdiv(config.context_len, PAGE)
    return scratch(heads, k, pages, tokens, device_of(torch.device(f"cuda:{gpu}")))
