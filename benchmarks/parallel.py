"""`python -m benchmarks.parallel`: a context-parallel decode step on 1, 2, 4, … GPUs of this machine, and its parts.

One process per GPU, NCCL, everything in CUDA graphs; a time is the median of replays on the slowest rank. Before a case
is timed, all ranks' selections are compared. Results are JSON lines: the first tells where they come from.
"""

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh

from xmla import torch_api
from xmla.bench.problems import block_table, indexer_pool, latent_pool
from xmla.bench.provenance import provenance
from xmla.core.parallel import Ownership, received_bytes
from xmla.machine.files import writable
from xmla.torch_api.parallel import ContextParallel, all_gather

HEADS, INDEX_HEADS, K, PAGE, SCALE = 128, 64, 2048, 64, 0.1352
CONTEXTS = (32768, 131072, 1048576)
BATCHES = (8, 64)
ROUNDS = 15
COUNTED = 50  # steps whose bytes are counted
TIMEOUT = 60

app = typer.Typer(add_completion=False)


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Microseconds a replay on the slowest rank: the median of rounds of `repeats` that all ranks begin together."""
    graph.replay()
    samples = []
    for _ in range(ROUNDS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / repeats)
    slowest = torch.tensor([statistics.median(samples)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 2)


def nvlink_received(ordinal: int) -> int | None:
    """Bytes that a GPU's NVLinks have received so far, NCCL's flags included; None where the driver does not tell."""
    command = ["nvidia-smi", "nvlink", "-gt", "d", "-i", str(ordinal)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    counts = re.findall(r"Rx: (\d+) KiB", text)
    return sum(map(int, counts)) * 1024 if counts else None


def case(parallel: ContextParallel, requests: int, context: int, pools: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """The step and its parts at one size; every request has `context` keys."""
    ranks, rank = parallel.ownership.ranks, parallel.rank
    width = context // PAGE
    table = torch.full((requests, width), -1, dtype=torch.int32, device="cuda")
    own = list(range(rank, width, ranks))
    torch.manual_seed(rank)
    table[:, own] = block_table(requests, len(own) * PAGE, PAGE)
    lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    torch.manual_seed(0)  # queries are the same on every rank
    q = torch.randn(requests, HEADS, 576, device="cuda", dtype=torch.bfloat16)
    index_q = torch.randn(requests, INDEX_HEADS, 128, device="cuda", dtype=torch.bfloat16)
    index_weights = torch.randn(requests, INDEX_HEADS, device="cuda")
    mla_cache, indexer_cache = pools
    batch = parallel.batch(table, lengths)

    def step(scatter_heads: bool = False) -> tuple[torch.Tensor, ...]:
        return parallel.dsa_attention(
            q, index_q, index_weights, mla_cache, indexer_cache, batch, k=K, softmax_scale=SCALE,
            scatter_heads=scatter_heads,
        )  # fmt: skip

    _, lse, indices = step()
    chosen = [torch.empty_like(indices) for _ in range(ranks)]
    dist.all_gather(chosen, indices)
    right = all(torch.equal(other, indices) for other in chosen) and bool(lse.isfinite().all())
    right &= bool((indices[:, 1:] > indices[:, :-1]).all() and (indices[:, 0] >= 0).all())
    q8, weights = torch_api.quantize_indexer_query(index_q, index_weights)
    logits = torch_api.indexer_logits_paged(q8, weights, indexer_cache, batch.own_table, batch.own_lengths)
    slots, counts = torch_api.map_slots(indices, batch.block_table, page_size=PAGE, compact=True)
    candidates = torch.zeros((2, requests, K), dtype=torch.int32, device="cuda")
    all_candidates = candidates.new_zeros((ranks, *candidates.shape))
    all_candidates[:, 1] = torch.arange(ranks * K, device="cuda").view(ranks, 1, K)
    all_candidates[:, 0] = torch.randn(ranks, requests, K, device="cuda").view(torch.int32)
    part = torch.zeros(requests * HEADS * (512 * 2 + 4), dtype=torch.uint8, device="cuda")
    all_parts = part.new_zeros((ranks, part.numel()))
    outs = all_parts[:, : requests * HEADS * 1024].view(torch.bfloat16).view(ranks, requests, HEADS, 512)
    lses = all_parts[:, requests * HEADS * 1024 :].view(torch.float32).view(ranks, requests, HEADS)

    def gather(received: torch.Tensor, sent: torch.Tensor) -> None:
        all_gather(received.view(-1), sent.view(-1), group=parallel.group)

    scattered = part.new_zeros(part.numel())
    parts: dict[str, Callable[[], Any]] = {
        "step, scattered": partial(step, scatter_heads=True),
        "logits": partial(
            torch_api.indexer_logits_paged, q8, weights, indexer_cache, batch.own_table, batch.own_lengths
        ),
        "topk": partial(torch_api.select_topk, logits, batch.own_lengths, k=K),
        "attention": partial(torch_api.sparse_mla, q, mla_cache, slots, counts, softmax_scale=SCALE),
        "merge_topk": partial(
            torch_api.merge_topk, all_candidates[:, 0].view(torch.float32), all_candidates[:, 1], k=K
        ),
        "merge_attention": partial(torch_api.merge_attention, outs, lses),
        "exchange candidates": partial(gather, all_candidates, candidates),
        "exchange attention": partial(gather, all_parts, part),
        "exchange attention, scattered": partial(
            dist.all_to_all_single, scattered.view(ranks, -1), part.view(ranks, -1), group=parallel.group
        ),
    }
    if ranks == 1:
        whole = partial(
            torch_api.dsa_attention, q, index_q, index_weights, mla_cache, indexer_cache, table, lengths, k=K,
            softmax_scale=SCALE,
        )  # fmt: skip
        parts = {"one GPU": whole} | {name: parts[name] for name in ("logits", "topk", "attention")}
    repeats = 10 if context < 1 << 20 else 4
    graph = capture(step)
    times = {"step": time_graph(graph, repeats)}
    times |= {name: time_graph(capture(call), repeats) for name, call in parts.items()}
    received = received_bytes(requests, HEADS, K, ranks)
    figures: dict[str, Any] = {"ranks": ranks, "requests": requests, "context": context, "right": right, "us": times,
               "received_bytes": received}  # fmt: skip
    if ranks > 1:
        exchange = times["exchange candidates"] + times["exchange attention"]
        figures["share_of_exchange"] = round(exchange / times["step"], 3)
        before = nvlink_received(rank)
        for _ in range(COUNTED):
            graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        after = nvlink_received(rank)
        if before is not None and after is not None:
            figures["nvlink_received_bytes"] = (after - before) // COUNTED
    return figures


@app.command()
def worker(store: str, rank: int, ranks: int, seconds: float) -> None:
    """One rank; the first prints a JSON line per case, and begins none after `seconds`."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT),
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    parallel = ContextParallel(init_device_mesh("cuda", (ranks,)), Ownership(ranks, PAGE))
    start = time.monotonic()
    for context in CONTEXTS:
        keys = max(BATCHES) * context // ranks
        pools = latent_pool(keys, PAGE), indexer_pool(keys, PAGE)
        for requests in BATCHES:
            late = torch.tensor([time.monotonic() - start > seconds], device="cuda", dtype=torch.int32)
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if not late.item():
                figures = case(parallel, requests, context, pools)
                if rank == 0:
                    print(json.dumps(figures), flush=True)
        del pools
        torch.cuda.empty_cache()
    dist.destroy_process_group()


@app.command()
def run(
    ranks: Annotated[list[int], typer.Option(min=1, help="Numbers of GPUs.")],
    out: Annotated[Path, typer.Option(help="Append to this file.", callback=writable)],
    commit: Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no case of a number of ranks after this.")] = 60,
) -> None:
    """Time every case on each number of ranks; exit 1 if one failed or was wrong."""
    words = ["python", "-m", "benchmarks.parallel", "run", *(w for n in ranks for w in ("--ranks", str(n)))]
    with out.open("a") as file:
        file.write(json.dumps(provenance(shlex.join(words), commit)) + "\n")
    good = True
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.parallel", "worker", f"{folder}/store"]
            processes = [
                subprocess.Popen([*command, str(rank), str(count), str(seconds)],
                                 stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True, env=os.environ)
                for rank in range(count)
            ]  # fmt: skip
            stdout = processes[0].stdout
            for line in stdout or ():
                if line.startswith("{"):
                    typer.echo(line.rstrip())
                    good &= json.loads(line)["right"]
                    with out.open("a") as file:
                        file.write(line)
            for process in processes:
                try:
                    good &= process.wait(timeout=TIMEOUT + 10) == 0
                except subprocess.TimeoutExpired:
                    process.kill()
                    good = False
    raise typer.Exit(code=int(not good))


if __name__ == "__main__":
    app()
