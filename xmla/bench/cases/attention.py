"""Sparse attention at the shapes of FlashMLA's benchmark, beside FlashMLA where it is installed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import baselines, problems
from xmla.bench.benchmark import Benchmark, rotation
from xmla.bench.errors import attention_error, relative_error
from xmla.core.formats.mla import NVFP4, V4, V32, MlaLayout
from xmla.torch_api._all_ops import TORCH_OPS

SCALE = 0.1352  # softmax scale of DeepSeek-V3.2
KEYS = 32768  # of a request, from which its tokens' keys are drawn
MOST = 128  # requests
K = 2048
PAGE = 64
DECODE = (
    *((requests, 128, s_q) for requests in (1, 2, 4, 8, 16, 64, MOST) for s_q in (1, 2)),
    *((requests, heads, 1) for requests in (1, 64, MOST) for heads in (16, 32, 64)),
)


def own_keys(requests: int, s_q: int, keys: int) -> torch.Tensor:
    """The first slot of each token's request [T, 1], where every request owns so many."""
    return torch.arange(requests, device=problems.DEVICE, dtype=torch.int32).repeat_interleave(s_q)[:, None] * keys


def decode_case(pool: torch.Tensor, requests: int, heads: int, s_q: int) -> Benchmark:
    tokens = requests * s_q
    sets = range(rotation(tokens * K * V32.row))
    q = torch.randn(len(sets), tokens, heads, 576, device=problems.DEVICE, dtype=torch.bfloat16) * 0.3
    owner = own_keys(requests, s_q, KEYS)
    slots = [problems.chosen_keys(tokens, KEYS, K) + owner for _ in sets]

    def call(ops: Any, q: Any, pool: Any, slots: Any) -> Any:
        return ops.sparse_mla(q, pool, slots, softmax_scale=SCALE)[0]

    def invariant(i: int) -> torch.Tensor:
        return torch_api.sparse_mla(q[i], pool, slots[i], softmax_scale=SCALE, batch_invariant=True)[0]

    peers: dict[str, Callable[[int], Any]] = {}
    if baselines.flash_mla() is not None:
        calls = [baselines.flash_mla_decode(q[i], pool, slots[i], requests, SCALE) for i in sets]
        peers["FlashMLA"] = lambda i: calls[i]()

    def check() -> float:
        out = call(TORCH_OPS, q[0], pool, slots[0])
        if "FlashMLA" in peers:
            return relative_error(out, peers["FlashMLA"](0))
        return attention_error(out, q[0], [(pool, slots[0], None)], SCALE)

    return Benchmark(
        op="sparse_mla",
        case=f"decode b={requests} h={heads} s_q={s_q} k={K}",
        call=call,
        inputs=[(q[i], pool, slots[i]) for i in sets],
        check=check,
        peers={**peers, "itself with batch_invariant": invariant},
        flops=2 * tokens * heads * K * (576 + 512),
        bytes=tokens * K * V32.row,
        bound="bf16",
    )


def decode() -> Iterator[Benchmark]:
    """Decode over the fp8 cache of V3.2."""
    pool = problems.latent_pool(MOST * KEYS)
    for requests, heads, s_q in DECODE:
        yield decode_case(pool, requests, heads, s_q)


# Heads, compressed entries per token, their page size and whether they have lengths: FlashMLA's benchmark of V4 decode,
# 128 keys of the window in pages of 256 beside them. V4-Flash and V4-Pro, layers of ratio 4 and of ratio 128.
MODEL1 = (
    ("M1-1", 64, 512, 64, False),
    ("M1-2", 128, 1024, 64, False),
    ("M1-3", 64, 1024, 2, True),
    ("M1-4", 128, 1024, 2, True),
)
V4_KEYS, V4_WINDOW, V4_S_Q, V4_SCALE = 16384, 128, 2, 512**-0.5


def decode_v4_case(
    name: str, requests: int, heads: int, extra_k: int, pool: torch.Tensor, extra_pool: torch.Tensor, with_lengths: bool
) -> Benchmark:
    tokens = requests * V4_S_Q
    sets = range(rotation(tokens * (V4_WINDOW + extra_k) * V4.row))
    q = torch.randn(len(sets), tokens, heads, 512, device=problems.DEVICE, dtype=torch.bfloat16) * 0.3
    sink = torch.randn(heads, device=problems.DEVICE)
    owner = own_keys(requests, V4_S_Q, V4_KEYS)
    slots, extra = ([problems.chosen_keys(tokens, V4_KEYS, k) + owner for _ in sets] for k in (V4_WINDOW, extra_k))
    lengths = None
    if with_lengths:
        lengths = torch.randint(extra_k + 1, (requests,), device=problems.DEVICE, dtype=torch.int32)
        lengths = lengths.repeat_interleave(V4_S_Q)
    attended = tokens * V4_WINDOW + (tokens * extra_k if lengths is None else int(lengths.sum()))
    inputs = [(q[i], pool, slots[i], None, sink, extra_pool, extra[i], lengths) for i in sets]

    def call(ops: Any, *arrays: Any) -> Any:
        return ops.sparse_mla(*arrays, softmax_scale=V4_SCALE)[0]

    peers: dict[str, Callable[[int], Any]] = {}
    if baselines.flash_mla() is not None:
        calls = [
            baselines.flash_mla_decode(q[i], pool, slots[i], requests, V4_SCALE, sink, extra_pool, extra[i], lengths)
            for i in sets
        ]
        peers["FlashMLA"] = lambda i: calls[i]()

    def check() -> float:
        out = call(TORCH_OPS, *inputs[0])
        if "FlashMLA" in peers:
            return relative_error(out, peers["FlashMLA"](0))
        sources = [(pool, slots[0], None), (extra_pool, extra[0], lengths)]
        return attention_error(out, q[0], sources, V4_SCALE, sink)

    pages = f"pages {pool.shape[1]}, {extra_pool.shape[1]}"
    return Benchmark(
        op="sparse_mla",
        case=f"{name} b={requests} h={heads} s_q={V4_S_Q} k={V4_WINDOW}+{extra_k} {pages}",
        call=call,
        inputs=inputs,
        check=check,
        peers=peers,
        flops=2 * heads * attended * (512 + 512),
        bytes=attended * V4.row,
        bound="bf16",
    )


def decode_v4() -> Iterator[Benchmark]:
    """V4 decode over two sources with a sink: keys drawn from 16384 of each request's own in either."""
    pool = problems.latent_pool(MOST * V4_KEYS, 256, V4)
    for name, heads, extra_k, extra_page, with_lengths in MODEL1:
        extra_pool = problems.latent_pool(MOST * V4_KEYS, extra_page, V4)
        for requests in (2, 64, MOST):
            yield decode_v4_case(name, requests, heads, extra_k, pool, extra_pool, with_lengths)


# Format, heads, keys per token and keys there are: FlashMLA's benchmark of prefill.
PREFILL = (
    (V32, 128, 2048, 8192),
    (V32, 128, 2048, 32768),
    (V32, 128, 2048, 131072),
    (V32, 64, 2048, 32768),
    (V4, 64, 512, 32768),
    (V4, 128, 1024, 32768),
)
PREFILL_TOKENS = 4096


def prefill_case(
    kind: str, layout: MlaLayout, k: int, q: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> Benchmark:
    """Prefill over `cache`, which is the plain `rows` or pages of the same entries."""
    tokens, heads, scale = len(q), q.shape[1], SCALE if layout == V32 else layout.dims**-0.5

    def call(ops: Any, q: Any, cache: Any, slots: Any) -> Any:
        return ops.sparse_mla(q, cache, slots, softmax_scale=scale)[0]

    peers: dict[str, Callable[[int], Any]] = {}
    if baselines.flash_mla() is not None:
        by_flash_mla = baselines.flash_mla_prefill(q, rows, slots, scale)
        peers["FlashMLA on bf16 rows"] = lambda _: by_flash_mla()

    def check() -> float:
        out = call(TORCH_OPS, q, cache, slots)
        if peers:
            return relative_error(out, peers["FlashMLA on bf16 rows"](0))
        return attention_error(out, q, [(cache, slots, None)], scale)

    version = "" if layout == V32 else f"{layout.name} "
    return Benchmark(
        op="sparse_mla",
        case=f"prefill {kind} {version}s_q={tokens} h={heads} k={k} s_kv={len(rows)}",
        call=call,
        inputs=[(q, cache, slots)],
        check=check,
        peers=peers,
        flops=2 * tokens * heads * k * (layout.dims + 512),
        bytes=tokens * k * layout.row,
        bound="bf16",
    )


def prefill() -> Iterator[Benchmark]:
    """Prefill of 4096 tokens, over plain bf16 rows and straight from the fp8 pages."""
    for layout, heads, k, keys in PREFILL:
        q = torch.randn(PREFILL_TOKENS, heads, layout.dims, device=problems.DEVICE, dtype=torch.bfloat16) * 0.3
        slots = problems.chosen_keys(PREFILL_TOKENS, keys, k)
        pool = problems.latent_pool(keys, layout=layout)
        rows = torch_api.read_mla_cache(pool, torch.arange(keys, device=problems.DEVICE, dtype=torch.int32))
        yield prefill_case("bf16 rows", layout, k, q, rows[:, None], rows, slots)
        yield prefill_case("fp8 pages", layout, k, q, pool, rows, slots)


FP4_DECODE = (*((requests, 128) for requests in (1, 8, 64, MOST)), *((64, heads) for heads in (16, 32, 64)))
FP4_PREFILL = ((128, 8192), (128, 131072))  # heads and keys there are: dequantised first, and packed


def fp4_case(kind: str, pools: tuple[torch.Tensor, ...], q: torch.Tensor, slots: torch.Tensor) -> Benchmark:
    """Attention to vLLM's entries of nvfp4_ds_mla, the first of `pools`, beside V3.2's."""
    sets, tokens, heads, k = *q.shape[:3], slots.shape[2]

    def call(ops: Any, q: Any, pool: Any, slots: Any) -> Any:
        return ops.sparse_mla(q, pool, slots, softmax_scale=SCALE)[0]

    return Benchmark(
        op="sparse_mla",
        case=f"{kind} nvfp4 t={tokens} h={heads} k={k} s_kv={pools[0].shape[0] * pools[0].shape[1]}",
        call=call,
        inputs=[(q[i], pools[0], slots[i]) for i in range(sets)],
        check=lambda: attention_error(
            call(TORCH_OPS, q[0], pools[0], slots[0]), q[0], [(pools[0], slots[0], None)], SCALE
        ),
        peers={"itself over V3.2's entries": lambda i: call(torch_api, q[i], pools[1], slots[i])},
        flops=2 * tokens * heads * k * (576 + 512),
        bytes=tokens * k * NVFP4.row,
        bound="bf16",
    )


def fp4_queries(sets: int, tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(sets, tokens, heads, 576, device=problems.DEVICE, dtype=torch.bfloat16) * 0.3


def fp4() -> Iterator[Benchmark]:
    """Decode and prefill over entries of 352 bytes."""
    layouts = NVFP4, V32
    pools = tuple(problems.latent_pool(MOST * KEYS, layout=layout) for layout in layouts)
    for tokens, heads in FP4_DECODE:
        sets = rotation(tokens * K * NVFP4.row)
        slots = torch.stack([problems.chosen_keys(tokens, KEYS, K) for _ in range(sets)]) + own_keys(tokens, 1, KEYS)
        yield fp4_case("decode", pools, fp4_queries(sets, tokens, heads), slots)
    for heads, keys in FP4_PREFILL:
        pools = tuple(problems.latent_pool(keys, layout=layout) for layout in layouts)
        slots = problems.chosen_keys(PREFILL_TOKENS, keys, K)[None]
        yield fp4_case("prefill", pools, fp4_queries(1, PREFILL_TOKENS, heads), slots)


SHARED = 4  # layers of one selection, as in GLM-5.2
SHARED_HEADS = 64


def shared_case(pools: list[torch.Tensor], table: torch.Tensor, requests: int) -> Benchmark:
    """Layers that attend to the same keys, whose slots the first finds for all, beside each finding its own."""
    sets = rotation(SHARED * requests * K * V32.row)
    q = torch.randn(sets, requests, SHARED_HEADS, 576, device=problems.DEVICE, dtype=torch.bfloat16) * 0.3
    chosen = [problems.chosen_keys(requests, KEYS, K) for _ in range(sets)]
    own = table[:requests].contiguous()

    def attend(ops: Any, q: Any, pool: Any, slots: Any) -> Any:
        return ops.sparse_mla(q, pool, slots, softmax_scale=SCALE)[0]

    def call(ops: Any, q: Any, chosen: Any, table: Any, *pools: Any) -> Any:
        slots, _ = ops.map_slots(chosen, table, page_size=PAGE)
        return tuple(attend(ops, q, pool, slots) for pool in pools)

    def in_each(index: int) -> list[Any]:
        return [call(TORCH_OPS, q[index], chosen[index], own, pool) for pool in pools]

    def check() -> float:
        last = call(TORCH_OPS, q[0], chosen[0], own, *pools)[-1]
        slots = own.gather(1, chosen[0].long() // PAGE) * PAGE + chosen[0] % PAGE
        return attention_error(last, q[0], [(pools[-1], slots.int(), None)], SCALE)

    return Benchmark(
        op="sparse_mla",
        case=f"{SHARED} layers of one selection b={requests} h={SHARED_HEADS} k={K} context={KEYS}",
        call=call,
        inputs=[(q[i], chosen[i], own, *pools) for i in range(sets)],
        check=check,
        peers={"itself, slots found in each layer": in_each},
        flops=SHARED * 2 * requests * SHARED_HEADS * K * (576 + 512),
        bytes=SHARED * requests * K * V32.row,
        bound="bf16",
    )


def shared() -> Iterator[Benchmark]:
    """Decodes of a group of layers that share a selection."""
    pools = [problems.latent_pool(64 * KEYS) for _ in range(SHARED)]
    table = problems.block_table(64, KEYS)
    for requests in (1, 8, 64):
        yield shared_case(pools, table, requests)
