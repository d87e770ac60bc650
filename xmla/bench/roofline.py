"""The roofline model's constant a launch, and docs/roofline.md: measured times beside the model's.

python -m xmla.bench.roofline document benchmarks/results/h200/bench.jsonl > docs/roofline.md
python -m xmla.bench.roofline launch
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import typer

from xmla.core.device import H200
from xmla.core.model import Call
from xmla.core.spec import Spec

SCALE = 0.1352
app = typer.Typer(add_completion=False)
HEAD = """# Roofline

Made by `python -m xmla.bench.roofline document benchmarks/results/h200/bench.jsonl > docs/roofline.md`. The model is
[roofline.py](../xmla/core/roofline.py): bytes and operations of a call over the rates that copies and matmuls reach,
plus a constant a launch; `xmla plan` prints it. It is a least time: it knows no latency within a kernel and no
conversion from fp8, and takes no entry to be read twice from memory. So its error on the H200, measured / model, is
what the kernels leave on the table.
"""


@dataclass(frozen=True)
class Estimate:
    op: str
    case: str
    measured: float
    model: float  # both in µs

    @property
    def ratio(self) -> float:
        return self.measured / self.model


# How the cases begin that `call_of` reads.
MODELLED = {
    "sparse_mla": r"decode b=|prefill (bf16 rows|fp8 pages) s_q=", "select_topk": r"\d+ × \d+ k=",
    "dsa_attention": "b=", "indexer_logits": "i=", "indexer_logits_paged": "b=", "indexer_topk": "i=",
}  # fmt: skip


def call_of(op: str, case: str) -> tuple[Call, int | None]:
    """The call that a benchmark's case names, and the keys of a request where they are fewer than its table holds."""
    sizes = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", case)}
    if op == "sparse_mla":
        tokens = sizes.get("b", 1) * sizes["s_q"]
        entries = sizes.get("s_kv", 1 << 22)
        rows, pages = Spec((entries, 1, 576), "bfloat16"), Spec((entries // 64, 64, 656), "uint8")
        cache = rows if "bf16 rows" in case else pages
        q, slots = Spec((tokens, sizes["h"], 576), "bfloat16"), Spec((tokens, sizes["k"]), "int32")
        return Call(op, {"q": q, "cache": cache, "slots": slots}, {"softmax_scale": SCALE}), None
    if op == "select_topk":
        rows, columns = map(int, re.findall(r"\d+", case)[:2])
        logits, ends = Spec((rows, columns), "float32"), Spec((rows,), "int32")
        return Call(op, {"logits": logits, "ends": ends}, {"k": sizes["k"]}), None
    if op == "dsa_attention":
        tokens, keys = sizes["b"], sizes["context"]
        specs = {
            "q": Spec((tokens, sizes["h"], 576), "bfloat16"), "index_q": Spec((tokens, 64, 128), "bfloat16"),
            "index_weights": Spec((tokens, 64), "float32"), "mla_cache": Spec((1 << 16, 64, 656), "uint8"),
            "indexer_cache": Spec((1 << 16, 64, 132), "uint8"), "lengths": Spec((tokens,), "int32"),
            "block_table": Spec((tokens, sizes.get("max_len", keys) // 64), "int32"),
        }  # fmt: skip
        return Call(op, specs, {"k": sizes.get("k", 2048), "softmax_scale": SCALE}), keys
    tokens = sizes["s_q"] if "s_q" in sizes else sizes["b"] * sizes["next_n"]
    heads, rows = sizes.get("i", 64), Spec((tokens,), "int32")
    query = {"q8": Spec((tokens, heads, 128), "float8_e4m3fn"), "weights": Spec((tokens, heads), "float32")}
    if op == "indexer_logits_paged":
        table = Spec((sizes["b"], 65536 // 64), "int32")
        paged = {"cache": Spec((1 << 16, 64, 132), "uint8"), "block_table": table, "lengths": rows}
        return Call(op, query | paged, {}), sizes["keys"]
    keys = sizes["s_kv"]
    ragged = {"keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32")}
    attrs = {}
    if op == "indexer_topk":
        mib = int(re.findall(r"in (\d+) MiB", case)[0])
        attrs = {"k": sizes["k"], "workspace_bytes": mib << 20}
    return Call(op, query | ragged | {"starts": rows, "ends": rows}, attrs), None


def estimates(lines: Iterable[Mapping[str, Any]]) -> Iterator[Estimate]:
    """Every timed case of a result that the model knows."""
    for line in lines:
        if "us" in line and re.match(MODELLED.get(line["op"], "$^"), line["case"]):
            call, keys = call_of(line["op"], line["case"])
            least = call.estimate(H200, keys)
            assert least is not None  # checked by bind
            yield Estimate(line["op"], line["case"], line["us"]["xmla"][0], least * 1e6)


def document(lines: Iterable[Mapping[str, Any]]) -> str:
    found = list(estimates(lines))
    rows = ["| op | cases | measured / model, geometric mean | least | most |", "|---|---|---|---|---|"]
    for op in dict.fromkeys(estimate.op for estimate in found):
        ratios = [estimate.ratio for estimate in found if estimate.op == op]
        shown = f"{geometric_mean(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f}"
        rows.append(f"| `{op}` | {len(ratios)} | {shown} |")
    cases = ["| op | case | measured, µs | model, µs | measured / model |", "|---|---|---|---|---|"]
    cases += [f"| `{e.op}` | {e.case} | {e.measured:.1f} | {e.model:.1f} | {e.ratio:.2f} |" for e in found]
    return "\n".join([HEAD, *rows, "", *cases]) + "\n"


@app.command("document")
def print_document(file: Annotated[Path, typer.Argument(help="A result of `xmla bench`.")]) -> None:
    """Print docs/roofline.md."""
    typer.echo(document(map(json.loads, file.read_text().splitlines())), nl=False)


@app.command()
def launch() -> None:
    """Measure the time from one launch of a CUDA graph to the next, of a kernel that does next to nothing."""
    import torch

    from xmla import torch_api

    indices, table = (torch.zeros(1, size, dtype=torch.int32, device="cuda") for size in (16, 4))
    out = torch.empty_like(indices), torch.empty(1, dtype=torch.int32, device="cuda")
    least = []
    for launches in (200, 1200):
        graph = torch.cuda.CUDAGraph()
        torch_api.map_slots(indices, table, page_size=64, out=out)
        with torch.cuda.graph(graph):
            for _ in range(launches):
                torch_api.map_slots(indices, table, page_size=64, out=out)
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        least.append(min(times))
    typer.echo(f"{least[1] - least[0]:.2f} µs from one launch of map_slots on a row to the next")


if __name__ == "__main__":
    app()
