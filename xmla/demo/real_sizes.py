"""The last part of DeepSeek-V3.2's demo, on a GPU: its real sizes, checked against float64 and JAX, and timed."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from rich.table import Table

from xmla import interop, torch_api
from xmla._frameworks import missing
from xmla.demo.figures import Figure, figure
from xmla.demo.tensors import identical, relative_error

HEADS, INDEX_HEADS, K, CONTEXT, PAGE, MAX_BATCH = 128, 64, 2048, 32768, 64, 64
SCALE = 0.1352  # DeepSeek-V3.2's, YaRN included
CHECKED_ROWS = 4


def _pools() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = MAX_BATCH * CONTEXT
    pages = tokens // PAGE
    mla = torch.empty(pages, PAGE, 656, dtype=torch.uint8, device="cuda")
    indexer = torch.empty(pages, PAGE, 132, dtype=torch.uint8, device="cuda")
    step = 1 << 18
    for first in range(0, tokens, step):
        slots = torch.arange(first, first + step, dtype=torch.int32, device="cuda")
        latent, rope, keys = (torch.randn(step, n, device="cuda", dtype=torch.bfloat16) for n in (512, 64, 128))
        torch_api.write_mla_cache(latent, rope, slots, mla)
        torch_api.write_indexer_cache(keys, slots, indexer)
    return mla, indexer


def _microseconds(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def _float64(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    scores = q.double() @ rows.double().T * SCALE
    return scores.softmax(-1) @ rows[:, :512].double()


def measure(bounds: Mapping[str, float]) -> tuple[list[Figure], Table]:
    """Figures of agreement, and a table of times: a row per op, a column per batch size."""
    torch.manual_seed(0)
    mla, indexer = _pools()
    pages = CONTEXT // PAGE
    tables = torch.randperm(MAX_BATCH * pages, device="cuda", dtype=torch.int32).view(MAX_BATCH, pages)
    figures: list[Figure] = []
    times: dict[str, list[str]] = {}
    for batch in (1, MAX_BATCH):
        q = torch.randn(batch, HEADS, 576, device="cuda", dtype=torch.bfloat16) * 0.3
        index_q = torch.randn(batch, INDEX_HEADS, 128, device="cuda", dtype=torch.bfloat16)
        index_weights = torch.randn(batch, INDEX_HEADS, device="cuda")
        table = tables[:batch].contiguous()
        lengths = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")
        arrays = (q, index_q, index_weights, mla, indexer, table, lengths)
        out, lse, indices = torch_api.dsa_attention(*arrays, k=K, softmax_scale=SCALE)
        if not missing("jax"):
            from xmla import jax_api

            results = jax_api.dsa_attention(*map(interop.to_jax, arrays), k=K, softmax_scale=SCALE)
            for name, ours, theirs in zip(("out", "lse", "indices"), (out, lse, indices), results, strict=True):
                where = f"real sizes, b = {batch}"
                figures.append(identical(f"torch = JAX: {name}", where, ours, interop.to_torch(theirs)))
        slots, _ = torch_api.map_slots(indices, table, page_size=PAGE)
        for row in range(0, batch, max(1, batch // CHECKED_ROWS)):
            want = _float64(q[row], torch_api.read_mla_cache(mla, slots[row], dtype="float32"))
            where = f"real sizes, b = {batch}, row {row}"
            figures.append(figure("attention, same caches", where, relative_error(out[row], want), bounds))
        q8, folded = torch_api.quantize_indexer_query(index_q, index_weights)
        logits = torch_api.indexer_logits_paged(q8, folded, indexer, table, lengths)
        for name, call in {
            "quantize_indexer_query": partial(torch_api.quantize_indexer_query, index_q, index_weights),
            "indexer_logits_paged": partial(torch_api.indexer_logits_paged, q8, folded, indexer, table, lengths),
            "select_topk": partial(torch_api.select_topk, logits, lengths, k=K),
            "map_slots": partial(torch_api.map_slots, indices, table, page_size=PAGE),
            "sparse_mla": partial(torch_api.sparse_mla, q, mla, slots, softmax_scale=SCALE),
            "dsa_attention": partial(torch_api.dsa_attention, *arrays, k=K, softmax_scale=SCALE),
        }.items():
            times.setdefault(name, [name]).append(f"{_microseconds(call):.1f}")
    title = f"{HEADS} heads, {INDEX_HEADS} indexer heads, top-k {K}, context {CONTEXT}"
    report = Table("op", "b = 1, µs", f"b = {MAX_BATCH}, µs", title=title)
    for row in times.values():
        report.add_row(*row)
    return figures, report
