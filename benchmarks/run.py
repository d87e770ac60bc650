"""`python -m benchmarks.run [--op NAME …] [--out FILE]`: time ops at serving size beside peers and ceilings.

Every figure is a median of CUDA-graph replays over inputs rotated past the L2 cache. Before a case is timed its result
is compared with the peer's, or with the portable definition, and a wrong one is not timed. Results are JSON lines: the
first names command, commit, versions, device and ceilings, each further one is a case.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import baselines, problems
from benchmarks.provenance import provenance
from benchmarks.timing import Timing, measure
from xmla import torch_api

SCALE = 0.1352  # softmax scale of DeepSeek-V3.2
L2_BYTES = 60 << 20
LOGITS_TOLERANCE = 3e-3  # DeepGEMM's own bound, 1 − 2Σab/Σ(a²+b²) < 5e-6, as a relative norm


@dataclass(frozen=True)
class Benchmark:
    """One case: `ours` and `peers` are functions of an input set; flops and bytes are a call's, as the model counts."""

    op: str
    case: str
    ours: Callable[[int], Any]
    peers: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    flops: float = 0.0
    bytes: float = 0.0
    sets: int = 1
    check: Callable[[], float] = lambda: 0.0
    tolerance: float = 1e-2
    bound: str = "copy"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def rotation(bytes_a_set: float) -> int:
    """Input sets that together pass twice the L2 cache."""
    return max(2, min(8, int(2 * L2_BYTES // max(bytes_a_set, 1)) + 1))


def decode() -> Iterator[Benchmark]:
    """Decode over the fp8 cache: FlashMLA's benchmark shapes, keys drawn from 32768 of each request's own."""
    pool = problems.latent_pool(128 * 32768)
    peer = baselines.flash_mla()
    shapes = [(b, 128, s_q) for b in (1, 2, 16, 64, 128) for s_q in (1, 2)]
    shapes += [(b, h, 1) for b in (1, 64, 128) for h in (16, 32, 64)]
    for requests, heads, s_q in shapes:
        tokens, k = requests * s_q, 2048
        sets = rotation(tokens * k * 656)
        q = torch.randn(sets, tokens, heads, 576, device="cuda", dtype=torch.bfloat16) * 0.3
        owner = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(s_q)[:, None] * 32768
        slots = [problems.chosen_keys(tokens, 32768, k) + owner for _ in range(sets)]

        def ours(i: int, q: Any = q, slots: Any = slots) -> torch.Tensor:
            return torch_api.sparse_mla(q[i], pool, slots[i], softmax_scale=SCALE)[0]

        peers, check = {}, lambda: 0.0
        if peer is not None:
            calls = [baselines.flash_mla_decode(q[i], pool, slots[i], requests, SCALE) for i in range(sets)]
            peers = {"FlashMLA": lambda i, calls=calls: calls[i]()}
            check = lambda ours=ours, calls=calls: relative_error(ours(0), calls[0]())
        yield Benchmark(
            "sparse_mla", f"decode b={requests} h={heads} s_q={s_q} k={k}", ours, peers,
            2 * tokens * heads * k * (576 + 512), tokens * k * 656, sets, check, bound="bf16",
        )  # fmt: skip


def prefill() -> Iterator[Benchmark]:
    """Prefill of 4096 tokens, 128 heads, over plain bf16 rows and straight from the fp8 pages."""
    peer = baselines.flash_mla()
    for keys in (8192, 32768, 131072):
        tokens, heads, k = 4096, 128, 2048
        q = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16) * 0.3
        slots = problems.chosen_keys(tokens, keys, k)
        pool = problems.latent_pool(keys)
        every = torch.arange(keys, device="cuda", dtype=torch.int32)
        rows = torch_api.read_mla_cache(pool, every)
        flops = 2 * tokens * heads * k * (576 + 512)
        call = None if peer is None else baselines.flash_mla_prefill(q, rows, slots, SCALE)
        peers = {} if call is None else {"FlashMLA on bf16 rows": lambda i, call=call: call()}
        for kind, cache in (("bf16 rows", rows[:, None]), ("fp8 pages", pool)):

            def ours(i: int, q: Any = q, cache: Any = cache, slots: Any = slots) -> torch.Tensor:
                return torch_api.sparse_mla(q, cache, slots, softmax_scale=SCALE)[0]

            def check(ours: Any = ours, call: Any = call) -> float:
                return 0.0 if call is None else relative_error(ours(0), call())

            case = f"prefill {kind} s_q={tokens} h={heads} k={k} s_kv={keys}"
            yield Benchmark("sparse_mla", case, ours, peers, flops, tokens * k * 656, 1, check, bound="bf16")


def ragged_logits() -> Iterator[Benchmark]:
    for heads in (64, 32):
        for tokens, keys in ((2048, 8192), (2048, 65536), (8192, 65536)):
            q8 = problems.e4m3(tokens, heads, 128)
            weights = torch.randn(tokens, heads, device="cuda")
            k8 = problems.e4m3(keys, 128)
            scales = torch.rand(keys, device="cuda") + 0.1
            starts = torch.zeros(tokens, device="cuda", dtype=torch.int32)
            ends = torch.arange(keys - tokens + 1, keys + 1, device="cuda", dtype=torch.int32)

            def ours(i: int, args: Any = (q8, weights, k8, scales, starts, ends)) -> torch.Tensor:
                return torch_api.indexer_logits(*args)

            def check(args: Any = (q8, weights, k8, scales, starts, ends)) -> float:
                got = torch_api.indexer_logits(*args)[:64]
                dots = torch.einsum("tid,nd->tin", args[0][:64].float(), args[2].float()).relu()
                want = torch.einsum("tin,ti->tn", dots, args[1][:64]) * args[3]
                valid = torch.arange(want.shape[1], device="cuda") < args[5][:64, None]
                return relative_error(got[valid], want[valid])

            pairs = int(ends.sum())
            yield Benchmark(
                "indexer_logits", f"i={heads} s_q={tokens} s_kv={keys} causal", ours, {}, 2 * pairs * heads * 128,
                tokens * keys * 4, 1, check, LOGITS_TOLERANCE, "fp8",
            )  # fmt: skip


def paged_logits() -> Iterator[Benchmark]:
    pool = problems.indexer_pool(64 * 65536)
    for requests, next_n, keys in (
        (64, 1, 8192), (64, 1, 65536), (64, 2, 65536), (64, 4, 65536), (1, 1, 65536), (4, 1, 65536),
    ):  # fmt: skip
        tokens = requests * next_n
        q8 = problems.e4m3(tokens, 64, 128)
        weights = torch.randn(tokens, 64, device="cuda")
        table = problems.block_table(requests, 65536)
        lengths = torch.full((tokens,), keys, device="cuda", dtype=torch.int32)
        read = requests * keys * 132
        sets = rotation(read)
        tables = [table[torch.randperm(requests, device="cuda")].contiguous() for _ in range(sets)]

        def ours(i: int, q8: Any = q8, weights: Any = weights, tables: Any = tables, lengths: Any = lengths) -> Any:
            return torch_api.indexer_logits_paged(q8, weights, pool, tables[i], lengths)

        def check(
            ours: Any = ours, q8: Any = q8, weights: Any = weights, table: Any = tables[0], n: int = keys
        ) -> float:
            got = ours(0)[0, :n]
            place = torch.arange(n, device="cuda")
            slots = table[0, place // 64] * 64 + place % 64
            k8, scales = torch_api.read_indexer_cache(pool, slots)
            want = (q8[0].float() @ k8.float().T).relu().T @ weights[0] * scales
            return relative_error(got, want)

        yield Benchmark(
            "indexer_logits_paged", f"b={requests} next_n={next_n} keys={keys}", ours, {},
            2 * tokens * keys * 64 * 128, read + tokens * keys * 4, sets, check, LOGITS_TOLERANCE,
        )  # fmt: skip


def topk() -> Iterator[Benchmark]:
    for rows, columns in ((64, 65536), (2048, 65536), (8192, 32768)):
        sets = rotation(rows * columns * 4)
        logits = torch.randn(sets, rows, columns, device="cuda")
        ends = torch.full((rows,), columns, device="cuda", dtype=torch.int32)

        def ours(i: int, logits: Any = logits, ends: Any = ends) -> torch.Tensor:
            return torch_api.select_topk(logits[i], ends, k=2048)

        def torch_topk(i: int, logits: Any = logits) -> torch.Tensor:
            return torch.topk(logits[i], 2048, sorted=False)[1]

        def check(ours: Any = ours, peer: Any = torch_topk, rows: int = rows) -> float:
            return float((ours(0).sort(1)[0] != peer(0).sort(1)[0]).sum() > rows)  # ties may differ

        yield Benchmark(
            "select_topk", f"{rows} × {columns} k=2048", ours, {"torch.topk": torch_topk}, 0.0, rows * columns * 4,
            sets, check,
        )  # fmt: skip


def whole_step() -> Iterator[Benchmark]:
    mla, indexer = problems.latent_pool(64 * 32768), problems.indexer_pool(64 * 32768)
    for requests in (1, 64):
        arguments = (
            torch.randn(requests, 128, 576, device="cuda", dtype=torch.bfloat16) * 0.3,
            torch.randn(requests, 64, 128, device="cuda", dtype=torch.bfloat16),
            torch.randn(requests, 64, device="cuda"),
            mla,
            indexer,
            problems.block_table(64, 32768)[:requests].contiguous(),
            torch.full((requests,), 32768, device="cuda", dtype=torch.int32),
        )

        def ours(i: int, arguments: Any = arguments) -> torch.Tensor:
            return torch_api.dsa_attention(*arguments, k=2048, softmax_scale=SCALE)[0]

        read = requests * (32768 * 132 + 2048 * 656)
        yield Benchmark("dsa_attention", f"b={requests} h=128 context=32768 k=2048", ours, bytes=read)


BENCHMARKS = {
    "sparse_mla": (decode, prefill),
    "indexer_logits": (ragged_logits,),
    "indexer_logits_paged": (paged_logits,),
    "select_topk": (topk,),
    "dsa_attention": (whole_step,),
}


def record(
    benchmark: Benchmark, times: Mapping[str, Timing], error: float, limits: Mapping[str, float]
) -> dict[str, Any]:
    """A case's line: times, rates, its ratio to each peer and the share of its ceiling (> 1: faster than the peer)."""
    ours = times["xmla"]
    seconds = ours.median * 1e-6
    if benchmark.bound == "copy":
        share = benchmark.bytes / seconds / limits["copy_bytes_per_s"]
    else:
        share = benchmark.flops / seconds / limits[f"{benchmark.bound}_flop_per_s"]
    return {
        "op": benchmark.op,
        "case": benchmark.case,
        "us": {name: [round(t.median, 2), round(t.minimum, 2), round(t.maximum, 2)] for name, t in times.items()},
        "tflop_per_s": round(benchmark.flops / seconds / 1e12, 1),
        "gb_per_s": round(benchmark.bytes / seconds / 1e9, 1),
        "ceiling": benchmark.bound,
        "share_of_ceiling": round(share, 3),
        "ratio_to_peer": {name: round(t.median / ours.median, 3) for name, t in times.items() if name != "xmla"},
        "relative_error": error,
    }


def main(
    op: Annotated[list[str] | None, typer.Option(help="Only these ops.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append JSON lines to this file.")] = None,
    commit: Annotated[str | None, typer.Option(help="Where the tree is not a git checkout.")] = None,
) -> None:
    """Time ops at serving size beside peers and ceilings; exit 1 if a result was wrong."""
    torch.manual_seed(0)
    limits = baselines.ceilings()
    command = shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]])
    lines = [provenance(command, commit) | {"flash_mla": baselines.FLASH_MLA_VERSION, "ceilings": limits}]
    console = Console(width=160)
    table = Table("op", "case", "µs", "TFLOP/s", "GB/s", "share of ceiling", "× peer", "error")
    wrong = False
    for name in op or BENCHMARKS:
        for family in BENCHMARKS[name]:
            for benchmark in family():
                error = benchmark.check()
                if not error <= benchmark.tolerance:
                    wrong = True
                    console.print(f"[red]{benchmark.op} {benchmark.case}: relative error {error}, not timed")
                    continue
                times = measure({"xmla": benchmark.ours, **benchmark.peers}, benchmark.sets)
                line = record(benchmark, times, error, limits)
                lines.append(line)
                table.add_row(
                    benchmark.op, benchmark.case, str(line["us"]["xmla"][0]), str(line["tflop_per_s"]),
                    str(line["gb_per_s"]), f"{line['share_of_ceiling']} {line['ceiling']}",
                    ", ".join(f"{ratio} {peer}" for peer, ratio in line["ratio_to_peer"].items()), f"{error:.1e}",
                )  # fmt: skip
            torch.cuda.empty_cache()
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    console.print({name: f"{value:.3e}" for name, value in limits.items()})
    console.print(table)
    raise typer.Exit(code=int(wrong))


if __name__ == "__main__":
    typer.run(main)
