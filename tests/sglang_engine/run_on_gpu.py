"""SGLang's engine on a GPU: xmla's plugin beside SGLang's own kernels, over a small model of V3.2's attention or V4's.

python tests/sglang_engine/run_on_gpu.py check --out FOLDER    the same requests to every engine: are answers alike?
python tests/sglang_engine/run_on_gpu.py speed --out FOLDER    prefill and decode, of engines that take turns
python tests/sglang_engine/run_on_gpu.py profile --out FOLDER  the kernels of one prefill and of decode steps, by time

Needs SGLang and the package's own dependencies; `own` engines FlashMLA and DeepGEMM too. All append to
FOLDER/sglang.jsonl, and the logs' ends to FOLDER/logs.txt.
"""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import engine
import typer

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
sys.path.append(str(FOLDER.parent / "vllm_engine"))  # what does not depend on the engine
import harness  # noqa: E402

from benchmarks.engines import entry_points  # noqa: E402

# Each engine and the one that its answers are compared with: first, how far apart SGLang's own are.
PAIRS = (
    ("own-chunks", "own"),
    ("own", "own-bf16"),
    ("xmla", "own-bf16"),
    ("xmla", "own"),
    ("xmla-bf16", "own-bf16"),
    ("own-graphs", "own"),
    ("own-all-graphs", "own"),
    ("own-drafts", "own"),
    ("own-ranks", "own"),
    *(("xmla-" + name, "xmla") for name in (
        "kv-bf16", "gathered", "chunks", "graphs", "all-graphs", "drafts", "drafts-3", "drafts-graphs", "ranks",
        "ranks-graphs", "ranks-4", "ranks-4-graphs",
    )),
    ("v4-own-torch", "v4-own"),
    ("v4-xmla", "v4-own"),
    ("v4-xmla", "v4-own-torch"),
    ("v4-own-graphs", "v4-own"),
    *(("v4-xmla-" + name, "v4-xmla") for name in ("graphs", "ranks", "drafts", "drafts-graphs")),
)  # fmt: skip
CHECKED = "own,own-bf16,own-chunks,xmla,xmla-bf16,xmla-chunks,xmla-graphs,xmla-all-graphs,xmla-drafts"
ENVIRONMENT = {
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",  # else prefills of few keys ask for FlashAttention 3
    # The Rust core of the radix tree fails with another release of torch than the one that it was built for.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # engines of one GPU run beside those of two
}  # fmt: skip
RUNS = "DeepSeek sparse attention runs on xmla"
READY = "kernels are ready"  # as the plugin logs in each process; what xmla logs of a kernel behind it was not listed
COMPILED = " s for sm_"
# SGLang's warnings of weights that a checkpoint or a model has not. It serves on, with whatever memory had there.
NOT_LOADED = "not initialized from checkpoints", "not found in params_dict"
KERNELS = 240  # seconds that nvcc may take for SGLang's kernels

Engines = Annotated[str, typer.Option(help=f"Of {', '.join(engine.ENGINES)}.")]
app = typer.Typer(add_completion=False)


def child(
    log: Path, seconds: float, environment: dict[str, str], *words: object, pipe: Connection | None = None
) -> int:
    """The exit status of `engine.py` with these words, in an environment with xmla's entry points and the tests'."""
    installed, called = log.parent / "installed", log.with_suffix(".called")
    points = entry_points.PROJECT["entry-points"]["sglang.srt.plugins"]
    points = points | {
        "called": "engine:count_calls",
        "passes": "engine:watch_passes",
        "streams": "engine:without_tilelang",
    }
    entry_points.write(installed, **{"sglang.srt.plugins": points})
    called.unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT), str(FOLDER), str(installed), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ENVIRONMENT | environment | {"PYTHONPATH": path, engine.CALLED: str(called)}
    return harness.run_engine([FOLDER / "engine.py", *words], log, environment, seconds, pipe)


def model_in(folder: Path, layers: int, heads: int, engines: list[str]) -> Path:
    """The model that these engines serve: of V4, which has layers and heads of its own, or of V3.2.

    Once V4's is made, what nvcc compiles for it is built.
    """
    of_v4 = {engine.ENGINES[name].v4 for name in engines}
    if len(of_v4) > 1:
        raise typer.BadParameter(f"{', '.join(engines)} serve two models")
    v4 = of_v4 == {True}
    model = folder / ("model-v4" if v4 else f"model-{layers}-{heads}")
    words = ["model-v4", model] if v4 else ["model", model, "--layers", layers, "--heads", heads]
    if not (model / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        status = child(folder / "model.log", 120, {}, *words)
        if status:
            print((folder / "model.log").read_text()[-3000:])
            raise typer.Exit(code=status)
        if v4:
            build_kernels_v4(folder)
    return model


def build_kernels_v4(folder: Path) -> None:
    """Before any engine's first step, in which each would compile them; it still does what fails here."""
    begun, log = time.monotonic(), folder / "kernels.log"
    status = child(log, KERNELS, {}, "kernels-v4")
    failure = f"\n{log.read_text()[-3000:]}" if status else ""
    print(f"SGLang's kernels: exit status {status} after {time.monotonic() - begun:.0f} s{failure}", flush=True)


def lines_file(out: Path, command: str, commit: str | None, model: Path) -> Path:
    """The file of a command's lines, with where they come from."""
    file, releases = out / "sglang.jsonl", {name: version(name) for name in ("sglang", "sglang-kernel")}
    harness.begin(file, f"python tests/sglang_engine/run_on_gpu.py {command}", commit, model, **releases)
    return file


def repeated(answers: harness.Answers) -> harness.Figures:
    """How many tokens of a request asked again were cached, and how many new ones are equal, by prompt."""
    found: harness.Figures = {"prompt": [], "cached": [], "equal_again": [], "accepted": []}
    for length, answer in answers.items():
        found["prompt"].append(int(length))
        found["cached"].append(answer["cached"])
        found["equal_again"].append(harness.equal_before(answer["again"], answer["tokens"]))
        found["accepted"].append(answer["accepted"])
    return found


def compiled_late(log: str) -> list[str] | None:
    """What xmla's log tells of kernels that were compiled or loaded behind warm-up, of which it tells too."""
    _, ready, rest = log.rpartition(READY)
    return [line[:200] for line in rest.splitlines() if COMPILED in line] if ready else None


def not_loaded(log: str) -> list[str]:
    """What SGLang's log tells of weights that a checkpoint or the model has not."""
    return [line[:200] for line in log.splitlines() if any(warning in line for warning in NOT_LOADED)]


def verdicts(
    found: harness.Pairs, asked_again: dict[str, harness.Figures], answers: harness.Answers
) -> dict[str, bool]:
    """What has to hold, of what ran."""
    wanted: dict[str, bool] = {}
    for name, result in answers.items():
        wanted[f"{name}: all weights are the checkpoint's"] = result["not_loaded"] == []
        if engine.ENGINES[name].plugin:
            called = {*engine.OPS} <= {*result["calls"]}
            wanted[f"{name}: attention and every op are xmla's"] = result["runs"] and called
            wanted[f"{name}: no step waits for a kernel"] = result["compiled_late"] == []
        else:
            wanted[f"{name}: nothing is xmla's"] = not result["runs"] and not result["calls"]
    for name, figures in asked_again.items():
        if not engine.ENGINES[name].v4:  # of which a prefix needs a window, too
            # All pages but the last are cached, whose token is computed; the same tokens come out of them.
            pages = zip(figures["cached"], figures["prompt"], strict=True)
            wanted[f"{name}: prompts asked again are cached"] = all(count >= length - 64 - 1 for count, length in pages)
        if engine.ENGINES[name].drafts:  # without any a step gives one token
            wanted[f"{name}: drafts are accepted"] = median(each or 0 for each in figures["accepted"]) > 1
    for (name, other), figures in found.items():
        if engine.ENGINES[name].drafts:  # more rows of a GEMM round otherwise, which a near tie shows
            _, *equal = sorted(figures["equal_tokens"])
            same = equal == [engine.NEW_TOKENS] * len(equal)
            wanted[f"{name}: tokens are those of {other}, of all prompts but one"] = same
    names = "xmla-drafts", "xmla-ranks", "xmla-chunks", "xmla-all-graphs", "xmla-gathered", "v4-"
    return wanted | harness.alike(found, names, engine.NEW_TOKENS, "SGLang")


@app.command()
def check(
    out: harness.Out, commit: harness.Commit = None, engines: Engines = CHECKED, seconds: harness.Seconds = 240,
    at_once: int = 4, layers: int = engine.LAYERS, heads: int = 128, work: Path | None = None,
) -> None:  # fmt: skip
    """Ask every engine the same, several at once; exit status 1 if one failed or answers are too far apart."""
    work = work or Path(tempfile.gettempdir()) / "xmla-sglang"
    names = engines.split(",")
    model = model_in(work, layers, heads, names)
    file = lines_file(out, "check", commit, model)

    def run(name: str, log: Path, answer: Path) -> int:
        return child(log, seconds, engine.ENGINES[name].environment(), "answer", name, model, answer)

    def logged(log: str) -> dict[str, Any]:
        return {"runs": RUNS in log, "compiled_late": compiled_late(log), "not_loaded": not_loaded(log)}

    kept = "runs", "calls", "seconds", "compiled_late", "not_loaded"
    answers = harness.ask_all(file, work, names, at_once, run, kept, logged)
    asked_again = {name: repeated(answered["answers"]) for name, answered in answers.items()}
    for name, figures in asked_again.items():
        harness.write(file, {"engine": name, "beside": "itself"} | figures)
        print(f"{name:>18} again: " + ", ".join(f"{key} {values}" for key, values in figures.items()))
    found = harness.compare(file, PAIRS, answers, lambda name: engine.NEW_TOKENS)
    harness.conclude(file, verdicts(found, asked_again, answers), len(answers) == len(names))


@contextmanager
def measured(
    out: Path, work: Path, engines: str, layers: int, heads: int, contexts: str, requests: str, start: float,
    seconds: float,
) -> Iterator[tuple[Path, harness.Engines]]:  # fmt: skip
    """The model, and the engines that are ready for such cases after `start` seconds, for so many seconds, in which no
    other of the model answers.
    """
    (work / "measured").mkdir(parents=True, exist_ok=True)

    def run(name: str, log: Path, pipe: Connection) -> int:
        words = "measure", name, pipe.fileno(), work / "measured", "--contexts", contexts, "--requests", requests
        limit = start + seconds + harness.ENDING
        return child(log, limit, engine.ENGINES[name].environment(), *words, pipe=pipe)

    model = partial(model_in, work, layers, heads, engines.split(","))
    with (
        harness.ready(out, work, engines.split(","), run, model, start) as ready,
        engine.locked(model(), fcntl.LOCK_EX),
    ):
        yield model(), ready


@app.command()
def speed(
    out: harness.Out, commit: harness.Commit = None, engines: Engines = "xmla-graphs,own-graphs",
    contexts: str = "4096,32768", requests: str = "1,8,64", seconds: Annotated[int, typer.Option(min=1)] = 180,
    start: int = 150, layers: int = engine.LAYERS, heads: int = 128, work: Path | None = None,
) -> None:  # fmt: skip
    """All engines at once, which take turns in each round of a case, smallest case first; then the kernels of one
    request of each context. `start` seconds at most until they are ready, `seconds` for the cases.
    """
    work = work or Path(tempfile.gettempdir()) / "xmla-sglang"
    with measured(out, work, engines, layers, heads, contexts, requests, start, seconds) as (model, ready):
        file = lines_file(out, "speed", commit, model)
        # The median step: each is a difference of two times, of which the least has the most noise.
        complete = harness.time_cases(file, engines.split(","), ready, contexts, requests, seconds, step=median)
    raise typer.Exit(code=int(not complete))


@app.command()
def profile(
    out: harness.Out, commit: harness.Commit = None, engines: Engines = "xmla-graphs,own-graphs", context: int = 4096,
    requests: int = 8, seconds: harness.Seconds = 120, layers: int = engine.LAYERS, heads: int = 128,
    work: Path | None = None,
) -> None:  # fmt: skip
    """Where the GPU's time goes: the kernels of each engine, one engine after the other."""
    work = work or Path(tempfile.gettempdir()) / "xmla-sglang"
    case = str(context), str(requests)
    with measured(out, work, engines, layers, heads, *case, seconds, harness.ENDING) as (model, ready):
        file = lines_file(out, "profile", commit, model)
        answers = harness.ask_in_turn(ready, 0, "kernels", context, requests)
        harness.write_kernels(file, answers, context, requests)
    raise typer.Exit(code=int(len(answers) < len(engines.split(","))))


if __name__ == "__main__":
    app()
