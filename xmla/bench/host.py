"""Host time of eager torch calls: what the CPU spends before the GPU can start."""

from typing import Any

import torch

from xmla import torch_api
from xmla.bench import problems
from xmla.bench.host_time import host_us


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
    return measurements
