"""vLLM's engine on a GPU: xmla's plugin beside vLLM's own kernels, over a small model with DeepSeek-V3.2's attention.

python tests/vllm_engine/on_gpu.py check --out FOLDER    the same requests to every engine: are answers alike?
python tests/vllm_engine/on_gpu.py speed --out FOLDER    prefill and decode by context and number of requests
python tests/vllm_engine/on_gpu.py profile --out FOLDER  the kernels of one prefill and of decode steps, by time

With `--engines xmla,xmla-ranks,xmla-keys` on two GPUs, with `xmla,xmla-drafts,xmla-drafts-3` with drafted tokens, with
`v4-own,v4-xmla` or `v41-own,v41-xmla` and the like of a model with DeepSeek-V4's or V4.1's attention, with
`own-long,xmla-long` or `v4-own-long,v4-xmla-long` long prompts, in steps that need most of the reserved memory. With
`--at-once 1` and `xmla,xmla-profiled` or `v4-xmla,v4-xmla-profiled` the cache is what vLLM's memory profile leaves.

Needs vLLM and the package's own dependencies. All append to FOLDER/vllm.jsonl, and the logs' ends to FOLDER/logs.txt.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import entry_points
import gpu_engine
import typer

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
# Each engine and the one that its answers are compared with: first, how far apart vLLM's own are.
PAIRS = (
    ("own-chunks", "own"),
    ("own", "own-bf16"),
    ("xmla", "own-bf16"),
    ("xmla", "own"),
    ("xmla-bf16", "own-bf16"),
    ("xmla-graphs", "xmla"),
    ("xmla-padded", "xmla"),
    ("xmla-compiled", "xmla"),
    ("xmla-profiled", "xmla"),
    ("own-graphs", "own"),
    ("own-compiled", "own"),
    *((f"xmla-{name}", "xmla") for name in ("ranks", "keys", "drafts", "drafts-3")),
    *((f"xmla-{name}-graphs", f"xmla-{name}") for name in ("ranks", "keys", "drafts")),
    ("v4-own-chunks", "v4-own"),
    ("v4-xmla-chunks", "v4-xmla"),
    ("v4-xmla", "v4-own"),
    ("v4-own-graphs", "v4-own"),
    ("v4-xmla-graphs", "v4-xmla"),
    ("v4-xmla-profiled", "v4-xmla"),
    ("own-long-chunks", "own-long"),
    ("xmla-long", "own-long"),
    ("v4-own-long-chunks", "v4-own-long"),
    ("v4-xmla-long", "v4-own-long"),
    ("v41-own-chunks", "v41-own"),
    ("v41-xmla", "v41-own"),
    ("v41-own-graphs", "v41-own"),
    ("v41-xmla-graphs", "v41-xmla"),
    ("v41-xmla-profiled", "v41-xmla"),
)
CHECKED = "own,xmla,own-bf16,own-chunks,xmla-graphs,xmla-padded,xmla-bf16"
# Several GPUs and drafts change the order of sums; this share of a prompt's most likely tokens has to stay.
SAME_LIKELY = 0.9
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_global_memory,skip_shared_memory,skip_local_memory,"
    "skip_constbank_memory,skip_nonrelocated_elf_images",
}  # fmt: skip
# What every engine on xmla calls; 0.33's model of V3.2 writes both caches itself, and V4's do in both releases.
CALLED = {"split_batch", "map_slots", "read_indexer_cache", "indexer_topk", "indexer_topk_paged", "sparse_mla"}
WRITERS = {"write_mla_cache", "write_indexer_cache"}
IN_BLOCKS = {"indexer_blocks", "indexer_blocks_paged", "indexer_block_topk", "indexer_block_topk_paged"}
# The class of attention, and those ops, by model.
OF_MODEL = {
    "v32": ("XmlaSparseImpl", CALLED), "v4": ("XmlaV4Attention", CALLED),
    "v41": ("XmlaV41Attention", CALLED | IN_BLOCKS),
}  # fmt: skip
# xmla may be this much farther from bfloat16 than vLLM's own kernels are, besides what another chunking changes.
FARTHER = 1.25

Out = Annotated[Path, typer.Option(help="Folder of the JSON lines and logs.", file_okay=False)]
Commit = Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")]
Engines = Annotated[str, typer.Option(help=f"Of {', '.join(gpu_engine.ENGINES)}.")]
Seconds = Annotated[int, typer.Option(min=1, help="The most that an engine may take.")]
app = typer.Typer(add_completion=False)


def child(log: Path, seconds: float, environment: dict[str, str], *words: object) -> int:
    """The exit status of `gpu_engine.py` with these words, in an environment with xmla's entry points."""
    installed = log.parent / "installed"
    entry_points.write(installed)
    path = os.pathsep.join([str(ROOT), str(installed), os.environ.get("PYTHONPATH", "")])
    # Of a kernel that fails: `cuda-gdb -batch -ex "target cudacore FILE"` names it.
    core = {"CUDA_COREDUMP_FILE": str(log.with_suffix(".%p.cudacore"))}
    command = ["timeout", "-k", "10", str(seconds), sys.executable, str(FOLDER / "gpu_engine.py"), *map(str, words)]
    with log.open("w") as shown:
        done = subprocess.run(
            command, env=os.environ | ENVIRONMENT | core | environment | {"PYTHONPATH": path}, stdout=shown,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    return done.returncode


def model_in(folder: Path, engines: str, layers: int, heads: int) -> Path:
    """The model of these engines, made if it is not there; those of V4 and V4.1 have their own sizes."""
    kinds = {gpu_engine.ENGINES[name].version for name in engines.split(",")}
    if len(kinds) > 1:
        raise typer.BadParameter("engines of one model", param_hint="--engines")
    (kind,) = kinds
    model = folder / (f"model-{layers}-{heads}" if kind == "v32" else kind)
    if not (model / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = "--kind", kind, "--layers", layers, "--heads", heads
        status = child(folder / "model.log", 120, {}, "model", model, *options)
        if status:
            print((folder / "model.log").read_text()[-3000:])
            raise typer.Exit(code=status)
    return model


def begin(out: Path, command: str, commit: str | None, model: Path) -> None:
    from xmla.bench.provenance import provenance

    out.mkdir(parents=True, exist_ok=True)
    config = gpu_engine.sizes_of(model)
    sizes = {name: config[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "index_topk")}
    settings = {name: value for name, value in os.environ.items() if name.startswith("XMLA_")}
    write(out, provenance(command, commit) | {"environment": settings, "vllm": version("vllm"), "model": sizes})


def write(out: Path, line: dict[str, Any]) -> None:
    with (out / "vllm.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def keep_log(out: Path, name: str, log: Path, status: int, lines: int = 80) -> None:
    """Keep a log's end, before it what names xmla and vLLM's own lines with their times; print the end of a failure."""
    text = [line for line in log.read_text().strip().splitlines() if not line.startswith((" - leaked", "nanobind"))]
    named = [line for line in text[:-lines] if "xmla" in line or line.startswith(("INFO", "WARNING"))]
    with (out / "logs.txt").open("a") as file:
        file.write("\n".join([f"=== {name}: exit status {status}", *named, "…", *text[-lines:], ""]))
    told = "" if status == 0 else ": " + "\n    ".join(text[-12:])
    print(f"{name}: exit status {status}{told}", flush=True)


def difference(answers: dict[str, Any], others: dict[str, Any]) -> dict[str, list[float]]:
    """By prompt: of log-probabilities the mean distance, the share of equal most likely tokens, equal new tokens."""
    found: dict[str, list[float]] = {"prompt": [], "mean_abs_logprob": [], "same_likely": [], "equal_tokens": []}
    for length, answer in answers.items():
        other = others[length]
        apart = [abs(a - b) for a, b in zip(answer["logprobs"], other["logprobs"], strict=True)]
        same = [a == b for a, b in zip(answer["likely"], other["likely"], strict=True)]
        equal = [a == b for a, b in zip(answer["tokens"], other["tokens"], strict=True)]
        found["prompt"].append(int(length))
        found["mean_abs_logprob"].append(round(sum(apart) / len(apart), 5))
        found["same_likely"].append(round(sum(same) / len(same), 4))
        found["equal_tokens"].append([*equal, False].index(False))
    return found


def verdicts(
    found: dict[tuple[str, str], dict[str, list[float]]], answers: dict[str, Any], release: str
) -> dict[str, bool]:
    """What has to hold, of what ran with this release of vLLM."""
    wanted: dict[str, bool] = {}
    for name, result in answers.items():
        engine = gpu_engine.ENGINES[name]
        if engine.plugin:
            attention, ops = OF_MODEL[engine.version]
            ops = ops | WRITERS if engine.version == "v32" and release.startswith("0.26") else ops
            counted = ops <= result["calls"].keys() or engine.ranks > 1  # other processes may not count
            wanted[f"{name}: attention and every op are xmla's"] = result["attention"] == [attention] and counted
            wanted[f"{name}: no step waits for a kernel"] = not result["compiled_late"]
    for (name, other), figures in found.items():
        if name.startswith(
            ("xmla-ranks", "xmla-keys", "xmla-drafts", "xmla-long", "xmla-profiled", "v4-xmla", "v41-xmla")
        ):
            wanted[f"{name} answers as {other}"] = min(figures["same_likely"]) >= SAME_LIKELY
    if ("xmla-graphs", "xmla") in found:
        equal = found["xmla-graphs", "xmla"]["equal_tokens"]
        wanted["graphs give the tokens of eager"] = equal == [gpu_engine.NEW_TOKENS] * len(equal)
    pairs = ("xmla", "own-bf16"), ("own", "own-bf16"), ("own-chunks", "own")
    if all(pair in found for pair in pairs):
        ours, own, floor = (found[pair]["mean_abs_logprob"] for pair in pairs)
        near = [a <= FARTHER * b + c for a, b, c in zip(ours, own, floor, strict=True)]
        wanted["xmla is as near to bfloat16 as vLLM's own kernels"] = all(near)
    return wanted


@app.command()
def check(
    out: Out, commit: Commit = None, engines: Engines = CHECKED, seconds: Seconds = 240, at_once: int = 4,
    layers: int = gpu_engine.LAYERS, heads: int = 128, work: Path | None = None,
) -> None:  # fmt: skip
    """Ask every engine the same, several at once; exit status 1 if one failed or answers are too far apart."""
    work = work or Path(tempfile.gettempdir()) / "xmla-vllm"
    model = model_in(work, engines, layers, heads)
    begin(out, "python tests/vllm_engine/on_gpu.py check", commit, model)

    def ask(name: str) -> tuple[str, Any]:
        file, log = work / f"{name}.json", work / f"{name}.log"
        file.unlink(missing_ok=True)
        begun = time.monotonic()
        environment = gpu_engine.ENGINES[name].environment()
        status = child(log, seconds, environment, "answer", name, model, file)
        answered = json.loads(file.read_text()) if file.exists() else None
        told = {"exit_code": status, "total_seconds": round(time.monotonic() - begun, 1)}
        kept = "attention", "calls", "seconds", "steps", "kernels", "compiled_late"
        told |= {key: answered[key] for key in kept} if answered else {}
        keep_log(out, name, log, status)
        write(out, {"engine": name} | told)
        print(f"    {told}", flush=True)
        return name, answered

    names = engines.split(",")
    with ThreadPoolExecutor(at_once) as threads:
        answers = {name: answered for name, answered in threads.map(ask, names) if answered}
    found = {
        (name, other): difference(answers[name]["answers"], answers[other]["answers"])
        for name, other in PAIRS
        if name in answers and other in answers
    }
    for (name, other), figures in found.items():
        write(out, {"engine": name, "beside": other, "new_tokens": gpu_engine.ENGINES[name].new} | figures)
        cells = (
            f"{length}: {apart:.4f} {same:.3f} {equal:>2}"
            for length, apart, same, equal in zip(*figures.values(), strict=True)
        )
        print(f"{name:>14} beside {other:12}" + "".join(f"{cell:>26}" for cell in cells))
    print("by prompt: mean |Δ| of log-probabilities, share of equal most likely tokens, equal new tokens")
    holds = verdicts(found, answers, version("vllm"))
    write(out, {"holds": holds})
    conclude(holds, len(answers) == len(names))


def conclude(holds: dict[str, bool], complete: bool) -> None:
    """Print the verdicts and exit: 1 if one does not hold or an engine gave no answers."""
    for what, right in holds.items():
        print(f"{'yes' if right else 'NO '} {what}")
    raise typer.Exit(code=int(not (all(holds.values()) and complete)))


def run_engine(
    out: Path, work: Path, model: Path, name: str, what: str, seconds: float, *options: object
) -> tuple[bool, list[dict[str, Any]]]:
    """Whether an engine succeeded, and the lines that it appended to those in `out`; its log is kept there too."""
    file, log = out / "vllm.jsonl", work / f"{name}-{what}.log"
    before = len(file.read_text().splitlines())
    status = child(log, seconds, gpu_engine.ENGINES[name].environment(), what, name, model, file, *options)
    keep_log(out, name, log, status)
    return status == 0, [json.loads(line) for line in file.read_text().splitlines()[before:]]


@app.command()
def speed(
    out: Out, commit: Commit = None, engines: Engines = "xmla-graphs,own-graphs", contexts: str = "4096,32768",
    requests: str = "1,8,64", tokens: int = 64, seconds: Annotated[int, typer.Option(min=1)] = 90, start: int = 150,
    layers: int = gpu_engine.LAYERS, heads: int = 128, work: Path | None = None,
) -> None:  # fmt: skip
    """One engine after the other, each as often as it is named: `start` seconds at most until it is ready and its first
    case is done, `seconds` for its cases, smallest first.
    """
    work = work or Path(tempfile.gettempdir()) / "xmla-vllm"
    model = model_in(work, engines, layers, heads)
    begin(out, "python tests/vllm_engine/on_gpu.py speed", commit, model)
    failed = False
    cases: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for name in engines.split(","):
        options = ("--contexts", contexts, "--requests", requests, "--tokens", tokens, "--seconds", seconds)
        succeeded, lines = run_engine(out, work, model, name, "measure", start + seconds, *options)
        failed |= not succeeded
        for case in lines:
            cases.setdefault((case["context"], case["requests"]), []).append(case)
    print("context requests | engine: µs a step, µs of the GPU's forward pass, tokens/s of prefill, ms of its passes")
    for (context, count), found in sorted(cases.items()):
        for case in found:
            keys = ("step_us", "forward_us", "prefill_tokens_per_s", "prefill_forward_ms")
            cells = [f"{case[key]:>10}" for key in keys] if "step_us" in case else [case["skipped"]]
            print(f"{context:>7} {count:>8} | {case['engine']:>14} {' '.join(cells)}")
    raise typer.Exit(code=int(failed))


@app.command()
def profile(
    out: Out, commit: Commit = None, engines: Engines = "xmla-graphs,own-graphs", context: int = 4096,
    requests: int = 1, seconds: Seconds = 120, layers: int = gpu_engine.LAYERS, heads: int = 128,
    work: Path | None = None,
) -> None:  # fmt: skip
    """Where the GPU's time goes: the kernels of each engine side by side."""
    work = work or Path(tempfile.gettempdir()) / "xmla-vllm"
    model = model_in(work, engines, layers, heads)
    begin(out, "python tests/vllm_engine/on_gpu.py profile", commit, model)
    failed = False
    for name in engines.split(","):
        options = ("--context", context, "--requests", requests)
        succeeded, lines = run_engine(out, work, model, name, "profile", seconds, *options)
        failed |= not succeeded
        for line in lines:
            print(f"{name:>14} {line['phase']:>8} {line['us']:>10} µs {line['launches']:>5} × {line['kernel'][:80]}")
    raise typer.Exit(code=int(failed))


if __name__ == "__main__":
    app()
