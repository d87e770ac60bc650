"""Host time of a call: what the CPU spends before the GPU can start, of eager torch and of a jitted JAX step."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from xmla import torch_api
from xmla.bench import problems

REPEATS, ROUNDS = 300, 7


def host_us(call: Callable[[], Any], wait: Callable[[], Any] = torch.cuda.synchronize) -> float:
    """Microseconds until `call` returns, median of rounds; the GPU keeps up, so nothing waits for it."""
    for _ in range(20):
        call()
    rounds = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        rounds.append((time.perf_counter() - start) / REPEATS * 1e6)
    wait()
    return round(statistics.median(rounds), 2)


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


def torch_lines() -> list[dict[str, Any]]:
    """A line an op, allocating its results and with `out` and `workspace`; `torch.add` beside it as the floor."""
    a = torch.randn(1, 64, device=problems.DEVICE)
    lines = []
    with torch.inference_mode():
        floor = host_us(lambda: torch.add(a, a))
        for name, (tensors, attrs) in arguments().items():
            function = getattr(torch_api, name)
            plan = function.plan(*tensors, **attrs)
            line = {
                "op": name, "case": "host time of an eager torch call", "launches": len(plan.active),
                "allocations": len(plan.results) + (plan.workspace_bytes > 0),
                "host_us": host_us(lambda f=function, t=tensors, a=attrs: f(*t, **a)), "torch_add_us": floor,
            }  # fmt: skip
            if plan.results:
                out = function(*tensors, **attrs)
                space = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=problems.DEVICE)
                line["host_us_out_workspace"] = host_us(
                    lambda f=function, t=tensors, a=attrs, o=out, w=space: f(*t, **a, out=o, workspace=w)
                )
            lines.append(line)
    return lines


def jax_lines() -> list[dict[str, Any]]:
    """Dispatch of a jitted decode step beside that of a jitted addition."""
    import jax

    from xmla import interop, jax_api

    tensors, attrs = arguments()["dsa_attention"]
    arrays = [interop.to_jax(tensor) for tensor in tensors]
    step = jax.jit(lambda *given: jax_api.dsa_attention(*given, **attrs))
    trivial = jax.jit(lambda x: x + 1)

    def wait() -> None:
        jax.block_until_ready(trivial(arrays[2]))

    ours, addition = host_us(lambda: step(*arrays), wait), host_us(lambda: trivial(arrays[2]), wait)
    case = "dispatch of a jitted JAX step"
    return [{"op": "dsa_attention", "case": case, "host_us": ours, "jitted_addition_us": addition}]


def lines() -> list[dict[str, Any]]:
    return [*torch_lines(), *jax_lines()]
