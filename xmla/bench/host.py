"""Host time of eager torch calls: what the CPU spends before the GPU can start."""

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from xmla import ModelConfig, torch_api, warmup
from xmla.bench import problems
from xmla.bench.host_time import host_us
from xmla.core.models.calls import Call
from xmla.core.registry import registry
from xmla.torch_api import _prepared

WARM_UP, CALLS = 500, 2000  # calls of new sizes: before and in a measurement, as many as are kept
PAGES = 1 << 14  # of a server's pools: a million tokens
CONFIG = ModelConfig(
    heads=16, shared_selection=True, next_n=(1,), batches=(256,), max_lens=(1 << 15,), prefill_tokens=(2048,)
)


def arguments() -> dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
    """Small inputs of every op that a decode step calls, as an engine holds them."""
    pages, heads, keys, k = 64, 16, 512, 64
    mla, indexer = problems.latent_pool(pages * 64), problems.indexer_pool(pages * 64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=problems.DEVICE, dtype=torch.bfloat16)

    q, index_q, weights = normal(1, heads, 576), normal(1, 64, 128), torch.randn(1, 64, device=problems.DEVICE)
    table = torch.arange(pages, device=problems.DEVICE, dtype=torch.int32)[None]
    lengths = torch.full((1,), keys, device=problems.DEVICE, dtype=torch.int32)
    slots = problems.chosen_keys(1, keys, k)
    q8, folded = torch_api.quantize_indexer_query(index_q, weights)
    logits = torch_api.indexer_logits_paged(q8, folded, indexer, table, lengths)
    return {
        "write_mla_cache": ((normal(1, 512), normal(1, 64), slots[0, :1], mla), {}),
        "write_indexer_cache": ((normal(1, 128), slots[0, :1], indexer), {}),
        "quantize_indexer_query": ((index_q, weights), {}),
        "indexer_logits_paged": ((q8, folded, indexer, table, lengths), {}),
        "select_topk": ((logits, lengths), {"k": k}),
        "map_slots": ((slots, table), {"page_size": 64}),
        "sparse_mla": ((q, mla, slots), {"softmax_scale": 0.1}),
        "dsa_attention": ((q, index_q, weights, mla, indexer, table, lengths), {"k": k, "softmax_scale": 0.1}),
    }


def of_new_sizes() -> dict[str, Callable[[random.Random], tuple[tuple[torch.Tensor, ...], dict[str, Any]]]]:
    """What makes arguments of a size that seldom comes again, as a server's batches and prompts have them."""
    pages, heads = 64, 16
    mla, indexer = problems.latent_pool(pages * 64), problems.indexer_pool(pages * 64)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, device=problems.DEVICE, dtype=dtype)

    def batch(source: random.Random) -> tuple[int, torch.Tensor, torch.Tensor]:
        tokens, width = source.randint(1, 256), source.randint(2, 512)
        return tokens, empty(tokens, width, dtype=torch.int32), empty(tokens, dtype=torch.int32)

    def write(source: random.Random) -> Any:
        tokens = source.randint(1, 8192)
        slots = torch.full((tokens,), -1, device=problems.DEVICE, dtype=torch.int64)
        return (empty(tokens, 512), empty(tokens, 64), slots, mla), {}

    def slots(source: random.Random) -> Any:
        tokens, table, _ = batch(source)
        return (empty(tokens, source.randint(1, 2048), dtype=torch.int32), table), {"page_size": 64}

    def select(source: random.Random) -> Any:
        tokens, table, lengths = batch(source)
        q8, weights = empty(tokens, 64, 128, dtype=torch.float8_e4m3fn), empty(tokens, 64, dtype=torch.float32)
        return (q8, weights, indexer, table, lengths), {"k": 2048}

    def attend(source: random.Random) -> Any:
        tokens, table, lengths = batch(source)
        indices = empty(tokens, source.randint(1, 2048), dtype=torch.int32)
        return (empty(tokens, heads, 576), mla, indices, table, lengths), {"softmax_scale": 0.1}

    def step(source: random.Random) -> Any:
        tokens, table, lengths = batch(source)
        weights = empty(tokens, 64, dtype=torch.float32)
        arrays = empty(tokens, heads, 576), empty(tokens, 64, 128), weights, mla, indexer, table, lengths
        return arrays, {"k": 2048, "softmax_scale": 0.1}

    return {
        "write_mla_cache": write, "map_slots": slots, "indexer_topk_paged": select, "sparse_mla_paged": attend,
        "dsa_attention": step,
    }  # fmt: skip


def of_a_server() -> dict[str, Callable[[random.Random], tuple[tuple[torch.Tensor | None, ...], dict[str, Any]]]]:
    """What makes arguments of the calls of steps within `CONFIG`, which name no format, as users' calls."""
    pools: dict[tuple[int, ...], torch.Tensor] = {}

    def tensor(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        fill = -1 if name in ("slots", "entry_slots") else 0  # no entry is written
        return torch.full(shape, fill, device=problems.DEVICE, dtype=getattr(torch, dtype))

    def pool(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return pools.setdefault(shape, tensor("", shape, dtype))

    def arguments(call: Call) -> tuple[tuple[torch.Tensor | None, ...], dict[str, Any]]:
        op, specs, attrs = registry()[call.op], call.with_pages(PAGES).specs, call.attrs
        formats = {each.format_attribute for each in op.tensors.values()}
        tensors = {
            name: (pool if op.tensors[name].format else partial(tensor, name))(spec.shape, spec.dtype)
            for name, spec in specs.items()
        }
        return tuple(map(tensors.get, op.tensors)), {name: attrs[name] for name in attrs if name not in formats}

    def decode(name: str) -> Callable[[random.Random], Any]:
        def draw(source: random.Random) -> Any:
            calls = CONFIG.decode(source.randint(1, max(CONFIG.batches)), 1, source.randint(2, max(CONFIG.max_lens)))
            return arguments(next(call for call in calls if call.op == name))

        return draw

    def prefill(name: str) -> Callable[[random.Random], Any]:
        def draw(source: random.Random) -> Any:
            sizes = source.randint(1, max(CONFIG.prefill_tokens)), source.randint(2, max(CONFIG.max_lens))
            return arguments(next(call for call in CONFIG.prefill(*sizes) if call.op == name))

        return draw

    return {
        "write_mla_cache": decode("write_mla_cache"), "map_slots": prefill("map_slots"),
        "indexer_topk": prefill("indexer_topk"), "sparse_mla_paged": decode("sparse_mla_paged"),
        "dsa_attention": decode("dsa_attention"), "dsa_step": decode("dsa_step"),
    }  # fmt: skip


@contextmanager
def collections() -> Iterator[list[float]]:
    """The seconds of each collection of garbage inside."""
    pauses: list[float] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            pauses.append(time.perf_counter())
        else:
            pauses[-1] = time.perf_counter() - pauses[-1]

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def new_size_line(name: str, make: Callable[[random.Random], Any], warmed: bool) -> dict[str, Any]:
    """Calls of ever new sizes: how long the median and the slowest take, and what garbage collection sees of them.

    `warmed`: after warm-up of the server whose calls they are.
    """
    function, source = getattr(torch_api, name), random.Random(0)

    def seconds() -> float:
        tensors, attrs = make(source)
        torch.cuda.synchronize()
        start = time.perf_counter()
        function(*tensors, **attrs)
        return time.perf_counter() - start

    _prepared.call_cache.clear()
    if warmed:
        warmup(CONFIG, progress=False)
    for _ in range(WARM_UP):
        seconds()
    gc.collect()
    gc.freeze()  # collections then look at what these calls make alone, not at all that the process has
    with collections() as pauses:
        objects = len(gc.get_objects())
        times = sorted(1e6 * seconds() for _ in range(CALLS))
        gc.collect()
        objects = len(gc.get_objects()) - objects
    gc.unfreeze()
    families = sum(kind.count for kind in (*_prepared.call_cache.kinds.values(), *_prepared.call_cache.ahead.values()))
    _prepared.call_cache.clear()
    case = "host time of an eager torch call of new sizes" + ", after warm-up" * warmed
    return {
        "op": name, "case": case, "host_us": round(times[CALLS // 2], 2),
        "host_us_of_99.9_percent": round(times[-1 - CALLS // 1000], 2),
        "objects_a_size": round(objects / CALLS, 2), "longest_collection_ms": round(1e3 * max(pauses), 2),
        "families": families,
    }  # fmt: skip


def lines() -> list[dict[str, Any]]:
    """A line per op, allocating its results and with `out` and `workspace`; `torch.add` beside it as the floor."""
    a = torch.randn(1, 64, device=problems.DEVICE)
    measurements = []
    with torch.inference_mode():
        floor = host_us(lambda: torch.add(a, a), torch.cuda.synchronize)
        for name, (tensors, attrs) in arguments().items():
            function = getattr(torch_api, name)
            plan = function.plan(*tensors, **attrs)
            line = {
                "op": name, "case": "host time of an eager torch call", "launches": len(plan.active),
                "allocations": len(plan.results) + (plan.workspace_bytes > 0),
                "host_us": host_us(lambda f=function, t=tensors, a=attrs: f(*t, **a), torch.cuda.synchronize),
                "torch_add_us": floor,
            }  # fmt: skip
            if plan.results:
                out = function(*tensors, **attrs)
                space = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=problems.DEVICE)
                line["host_us_out_workspace"] = host_us(
                    lambda f=function, t=tensors, a=attrs, o=out, w=space: f(*t, **a, out=o, workspace=w),
                    torch.cuda.synchronize,
                )
            measurements.append(line)
        measurements += [new_size_line(name, make, warmed=False) for name, make in of_new_sizes().items()]
        measurements += [new_size_line(name, make, warmed=True) for name, make in of_a_server().items()]
    return measurements
