"""vLLM's engine on a GPU: xmla's plugin beside vLLM's own kernels, over a small model with DeepSeek-V3.2's attention.

python tests/vllm_engine/on_gpu.py check --out FOLDER    the same requests to every engine: are answers alike?
python tests/vllm_engine/on_gpu.py speed --out FOLDER    prefill and decode, of engines that take turns
python tests/vllm_engine/on_gpu.py profile --out FOLDER  the kernels of one prefill and of decode steps, by time
python tests/vllm_engine/on_gpu.py trace --out FOLDER    requests of many lengths that come by and by: latencies

With `--engines xmla,xmla-ranks,xmla-keys` on two GPUs, with `xmla,xmla-ranks-4` on four, with
`xmla,xmla-drafts,xmla-drafts-3` with drafted tokens, with `v4-own,v4-xmla`, `v41-own,v41-xmla` or `glm-own,glm-xmla`
and the like of a model with DeepSeek-V4's, V4.1's or GLM-5.3-Flash's attention, with `own-long,xmla-long` or
`v4-own-long,v4-xmla-long` long prompts, in steps that need most of the reserved memory. With `--at-once 1` and
`xmla,xmla-profiled` or `v4-xmla,v4-xmla-profiled` the cache is what vLLM's memory profile leaves.

Needs vLLM and the package's own dependencies. All append to FOLDER/vllm.jsonl, and the logs' ends to FOLDER/logs.txt.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import gpu_engine
import harness
import numpy as np
import typer
from harness import Answers, Commit, Out, Pairs, Seconds, alike, ask_all, begin, compare, conclude

from benchmarks.engines import entry_points

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
    *((f"xmla-{name}", "xmla") for name in ("ranks", "ranks-4", "keys", "drafts", "drafts-3")),
    *((f"xmla-{name}-graphs", f"xmla-{name}") for name in ("ranks", "ranks-4", "keys", "drafts")),
    ("xmla-invariant", "xmla"),
    *((f"xmla-invariant-{name}", "xmla-invariant") for name in ("alone", "drafts")),
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
    ("glm-own-chunks", "glm-own"),
    ("glm-own-graphs", "glm-own"),
    ("glm-own-fp8", "glm-own"),
    ("glm-xmla", "glm-own"),
    ("glm-xmla-fp8", "glm-own-fp8"),
    ("glm-xmla-graphs", "glm-xmla"),
)
CHECKED = "own,xmla,own-bf16,own-chunks,xmla-graphs,xmla-padded,xmla-bf16"
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
    "v41": ("XmlaV41Attention", CALLED | IN_BLOCKS), "glm": ("XmlaSparseImpl", CALLED | {"expand_blocks"}),
}  # fmt: skip

LASTING = 12  # seconds of a trace
ENDING = 10  # seconds that are left for engines to end

Engines = Annotated[str, typer.Option(help=f"Of {', '.join(gpu_engine.ENGINES)}.")]
app = typer.Typer(add_completion=False)


def child(
    log: Path, seconds: float, environment: dict[str, str], *words: object, pipe: Connection | None = None
) -> int:
    """The exit status of `gpu_engine.py` with these words, in an environment with xmla's entry points."""
    installed = log.parent / "installed"
    entry_points.write(installed)
    path = os.pathsep.join([str(ROOT), str(installed), os.environ.get("PYTHONPATH", "")])
    # Of a kernel that fails: `cuda-gdb -batch -ex "target cudacore FILE"` names it.
    core = {"CUDA_COREDUMP_FILE": str(log.with_suffix(".%p.cudacore"))}
    environment = os.environ | ENVIRONMENT | core | environment | {"PYTHONPATH": path}
    return harness.run_engine([FOLDER / "gpu_engine.py", *words], log, environment, seconds, pipe)


def kind_of(engines: str) -> str:
    """Which model these engines have."""
    kinds = {gpu_engine.ENGINES[name].version for name in engines.split(",")}
    if len(kinds) > 1:
        raise typer.BadParameter("engines of one model", param_hint="--engines")
    return kinds.pop()


def model_in(folder: Path, engines: str, layers: int, heads: int) -> Path:
    """The model of these engines, made if it is not there; others than V3.2's have their own sizes."""
    kind = kind_of(engines)
    model = folder / (f"model-{layers}-{heads}" if kind == "v32" else kind)
    if not (model / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = "--kind", kind, "--layers", layers, "--heads", heads
        status = child(folder / "model.log", 120, {}, "model", model, *options)
        if status:
            print((folder / "model.log").read_text()[-3000:])
            raise typer.Exit(code=status)
    return model


def lines_file(out: Path, command: str, commit: str | None, model: Path) -> Path:
    """The file of a command's lines, with where they come from."""
    file = out / "vllm.jsonl"
    begin(file, f"python tests/vllm_engine/on_gpu.py {command}", commit, model, vllm=version("vllm"))
    return file


def verdicts(found: Pairs, answers: Answers, release: str) -> dict[str, bool]:
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
    for name in ("xmla-invariant-alone", "xmla-invariant-drafts"):
        if (name, "xmla-invariant") in found:
            same = answers[name]["answers"] == answers["xmla-invariant"]["answers"]
            wanted[f"{name} has the bits of xmla-invariant"] = same
    names = "xmla-ranks", "xmla-keys", "xmla-drafts", "xmla-long", "xmla-profiled", "v4-xmla", "v41-xmla", "glm-xmla"
    return wanted | alike(found, names, gpu_engine.NEW_TOKENS, "vLLM")


@app.command()
def check(
    out: Out, commit: Commit = None, engines: Engines = CHECKED, seconds: Seconds = 240, at_once: int = 4,
    layers: int = gpu_engine.LAYERS, heads: int = 128, work: Path | None = None,
) -> None:  # fmt: skip
    """Ask every engine the same, several at once; exit status 1 if one failed or answers are too far apart."""
    work = work or Path(tempfile.gettempdir()) / "xmla-vllm"
    model = model_in(work, engines, layers, heads)
    file, names = lines_file(out, "check", commit, model), engines.split(",")

    def run(name: str, log: Path, answer: Path) -> int:
        return child(log, seconds, gpu_engine.ENGINES[name].environment(), "answer", name, model, answer)

    kept = "attention", "calls", "seconds", "steps", "kernels", "compiled_late"
    answers = ask_all(file, work, names, at_once, run, kept)
    found = compare(file, PAIRS, answers, lambda name: gpu_engine.ENGINES[name].new)
    conclude(file, verdicts(found, answers, version("vllm")), len(answers) == len(names))


@contextmanager
def measured(
    out: Path, work: Path, engines: str, layers: int, heads: int, contexts: str, requests: str, start: float,
    seconds: float,
) -> Iterator[tuple[Path, harness.Engines]]:  # fmt: skip
    """The model, and the engines that are ready for such cases after `start` seconds, for so many seconds."""
    kind_of(engines)
    tuned = {"TRITON_CACHE_AUTOTUNING": "1"}  # see gpu_engine.tune_in_turn

    def run(name: str, log: Path, pipe: Connection) -> int:
        environment = gpu_engine.ENGINES[name].environment() | tuned
        words = "measure", name, pipe.fileno(), "--contexts", contexts, "--requests", requests
        return child(log, start + seconds + harness.ENDING, environment, *words, pipe=pipe)

    model = partial(model_in, work, engines, layers, heads)
    with harness.ready(out, work, engines.split(","), run, model, start) as ready:
        yield model(), ready


@app.command()
def speed(
    out: Out, commit: Commit = None, engines: Engines = "xmla-graphs,own-graphs", contexts: str = "4096,32768",
    requests: str = "1,8,64", seconds: Annotated[int, typer.Option(min=1)] = 180, start: int = 150,
    layers: int = gpu_engine.LAYERS, heads: int = 128, work: Path | None = None,
) -> None:  # fmt: skip
    """All engines at once, which take turns in each round of a case, smallest case first; then the kernels of one
    request of each context. `start` seconds at most until they are ready, `seconds` for the cases.
    """
    work = work or Path(tempfile.gettempdir()) / "xmla-vllm"
    with measured(out, work, engines, layers, heads, contexts, requests, start, seconds) as (model, ready):
        file = lines_file(out, "speed", commit, model)
        # The fastest step: the host takes up to twice as long in other rounds, of any engine.
        complete = harness.time_cases(file, engines.split(","), ready, contexts, requests, seconds, step=min)
    raise typer.Exit(code=int(not complete))


def latencies(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The latencies of all requests of all rounds, and what they waited for.

    They are median and 99 % of the times, and each round's median; how much of the time steps with prefills took; what
    kernels that were not ready took in each round, and why requests waited for long.
    """
    told: dict[str, Any] = {"seconds": round(min(each["seconds"] for each in rounds), 2)}
    for key in ("ttft_ms", "tpot_ms"):
        times = [time for each in rounds for time in each[key]]
        told[key] = {"median": round(median(times), 2), "p99": round(float(np.percentile(times, 99)), 2)}
        told[f"{key}_by_round"] = [round(median(each[key]), 2) for each in rounds]
    told |= {key: round(median(each[key] for each in rounds), 3) for key in ("prefill_share", "busy_share")}
    told |= {f"{key}_by_round": [each[key] for each in rounds] for key in ("kernels_ms", "garbage_ms")}
    told["waits"] = dict(Counter(wait["cause"] for each in rounds for wait in each["waits"]))
    return told


def show_round(name: str, number: int, rate: float, told: dict[str, Any]) -> None:
    """Print a round's medians, the steps by their tokens, what took long, and each wait with its cause."""
    medians = {key: round(median(told[key]), 2) for key in ("ttft_ms", "tpot_ms")}
    shares = {key: told[key] for key in ("prefill_share", "busy_share", "kernels_ms", "garbage_ms")}
    print(name, number, rate, medians | shares, told["events"], flush=True)
    print(
        "    steps: " + "; ".join(" ".join(f"{key} {value}" for key, value in row.items()) for row in told["by_size"])
    )
    for step in told["slowest"][:3]:
        print(f"    slow: {step}")
    for wait in told["waits"][:3]:
        print(f"    wait: {wait}")


@app.command()
def trace(
    out: Out, commit: Commit = None, engines: Engines = "xmla-graphs,own-graphs", rates: str = "8",
    rounds: Annotated[int, typer.Option(min=1)] = 3, seconds: Seconds = 300, apart: bool = False,
    layers: int = gpu_engine.LAYERS, heads: int = 128, work: Path | None = None,
) -> None:  # fmt: skip
    """All engines at once, which take turns: each plays the same trace, of so many requests a second, with new prompts.

    `apart`: each has a GPU and its share of the cores for itself, and they play at the same time. A first round, twice
    as fast, does not count. There are `rounds` of each rate, as long as the seconds last. What each step took is in
    FOLDER/steps.jsonl.
    """
    begun, work = time.monotonic(), work or Path(tempfile.gettempdir()) / "xmla-vllm"
    kind_of(engines)
    names, model = engines.split(","), partial(model_in, work, engines, layers, heads)
    places = dict(zip(names, places_of(len(names)), strict=True)) if apart else {}

    def run(name: str, log: Path, pipe: Connection) -> int:
        gpu, cores = places.get(name, ({}, ""))
        # Else an engine would have the kernels that the one before it in a round has compiled.
        environment = gpu_engine.ENGINES[name].environment() | {"TRITON_CACHE_DIR": str(work / f"{name}-triton")} | gpu
        left = seconds - (time.monotonic() - begun)
        words = "serve", name, pipe.fileno(), *(("--cores", cores) if cores else ())
        return child(log, left, environment, *words, pipe=pipe)

    asked = [(float(rate), round(LASTING * float(rate))) for rate in rates.split(",")]
    played: dict[tuple[str, float], list[dict[str, Any]]] = {(name, rate): [] for name in names for rate, _ in asked}
    ended = False
    with harness.ready(out, work, names, run, model, seconds) as ready:
        file = lines_file(out, "trace", commit, model())
        for number, (rate, requests) in enumerate([asked[0], *(each for each in asked for _ in range(rounds))]):
            left = seconds - (time.monotonic() - begun)
            if left < 1.5 * LASTING * (1 if apart else len(names)) + ENDING:
                break
            question = requests, rate, number, 1 if number else 2
            answers = harness.ask_at_once(ready, *question) if apart else harness.ask_in_turn(ready, number, *question)
            ended |= len(answers) < len(names)
            for name, told in answers.items():
                played[name, rate] += [told] if number else []
                show_round(name, number, rate, told)
                harness.write(out / "steps.jsonl", {"engine": name, "rate": rate, "round": number} | told)
    for (name, rate), ran in played.items():
        line = {"engine": name, "trace": {"requests": round(LASTING * rate), "rate": rate, "rounds": len(ran)}}
        line["trace"] |= {"apart": True} if apart else {}
        line |= latencies(ran) if ran else {"refused": "the engine ended" if ended else "no time left"}
        harness.write(file, line)
        print(line)
    raise typer.Exit(code=int(ended or len(ready) < len(names)))


def places_of(engines: int) -> list[tuple[dict[str, str], str]]:
    """An environment with a GPU, and cores, for each engine."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(engines)))).split(",")
    if len(gpus) < engines:
        raise typer.BadParameter(f"{len(gpus)} GPUs for {engines} engines", param_hint="--apart")
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // engines
    parts = [",".join(map(str, cores[each * place : each * (place + 1)])) for place in range(engines)]
    return [({"CUDA_VISIBLE_DEVICES": gpu}, part) for gpu, part in zip(gpus, parts, strict=False)]


@app.command()
def profile(
    out: Out, commit: Commit = None, engines: Engines = "xmla-graphs,own-graphs", context: int = 4096,
    requests: int = 1, seconds: Seconds = 120, layers: int = gpu_engine.LAYERS, heads: int = 128,
    work: Path | None = None,
) -> None:  # fmt: skip
    """Where the GPU's time goes: the kernels of each engine, one engine after the other."""
    work = work or Path(tempfile.gettempdir()) / "xmla-vllm"
    case = str(context), str(requests)
    with measured(out, work, engines, layers, heads, *case, seconds, harness.ENDING) as (model, ready):
        file = lines_file(out, "profile", commit, model)
        answers = harness.ask_in_turn(ready, 0, "kernels", context, requests)
        harness.write_kernels(file, answers, context, requests)
    raise typer.Exit(code=int(len(answers) < len(engines.split(","))))


if __name__ == "__main__":
    app()
