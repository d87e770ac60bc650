"""What harnesses of engines on a GPU have alike: the answers of several at once, and what has to hold of them."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer

Out = Annotated[Path, typer.Option(help="Folder of the JSON lines and logs.", file_okay=False)]
Commit = Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")]
Seconds = Annotated[int, typer.Option(min=1, help="The most that an engine may take.")]
Answers = dict[str, Any]  # of an engine, by its name
Figures = dict[str, list[Any]]  # by prompt
Pairs = dict[tuple[str, str], Figures]  # of an engine beside another

# Several GPUs and drafts change the order of sums; this share of a prompt's most likely tokens has to stay.
SAME_LIKELY = 0.9
# xmla may be this much farther from bfloat16 than an engine's own kernels are, besides what another chunking changes.
FARTHER = 1.25


def begin(file: Path, command: str, commit: str | None, model: Path, **releases: str) -> None:
    """Write where the lines behind this come from."""
    from xmla.bench.provenance import provenance

    file.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    config |= config.pop("text_config", {})  # V4.1's
    sizes = {name: config[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "index_topk")}
    settings = {name: value for name, value in os.environ.items() if name.startswith("XMLA_")}
    write(file, provenance(command, commit) | {"environment": settings} | releases | {"model": sizes})


def write(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def keep_log(out: Path, name: str, log: Path, status: int, lines: int = 80) -> None:
    """Keep a log's end, before it what names xmla and vLLM's own lines with their times; print the end of a failure."""
    text = [line for line in log.read_text().strip().splitlines() if not line.startswith((" - leaked", "nanobind"))]
    named = [line for line in text[:-lines] if "xmla" in line or line.startswith(("INFO", "WARNING"))]
    with (out / "logs.txt").open("a") as file:
        file.write("\n".join([f"=== {name}: exit status {status}", *named, "…", *text[-lines:], ""]))
    told = "" if status == 0 else ": " + "\n    ".join(text[-12:])
    print(f"{name}: exit status {status}{told}", flush=True)


def ask_all(
    file: Path, work: Path, names: list[str], at_once: int, run: Callable[[str, Path, Path], int],
    kept: Iterable[str], logged: Callable[[str], dict[str, Any]] = lambda log: {},
) -> Answers:  # fmt: skip
    """What each engine writes to its file in `work`, with what its log says; several engines run at once.

    `run(name, log, answer)` gives the exit status. Of what is answered, `kept` goes to the lines of `file`.
    """

    def ask(name: str) -> tuple[str, Any]:
        answer, log = work / f"{name}.json", work / f"{name}.log"
        answer.unlink(missing_ok=True)
        begun = time.monotonic()
        status = run(name, log, answer)
        answered = json.loads(answer.read_text()) | logged(log.read_text()) if answer.exists() else None
        told = {"exit_code": status, "total_seconds": round(time.monotonic() - begun, 1)}
        told |= {key: answered[key] for key in kept} if answered else {}
        keep_log(file.parent, name, log, status)
        write(file, {"engine": name} | told)
        print(f"    {told}", flush=True)
        return name, answered

    with ThreadPoolExecutor(at_once) as threads:
        return {name: answered for name, answered in threads.map(ask, names) if answered}


@contextmanager
def ready(
    out: Path, work: Path, names: list[str], run: Callable[[str, Path, Connection], int]
) -> Iterator[dict[str, Connection]]:  # fmt: skip
    """A pipe to each engine that says it is ready. All start at once; behind this they are told to end.

    `run(name, log, pipe)` gives the exit status of an engine that answers what comes through the pipe until it is None.
    """
    pipes = {name: Pipe() for name in names}

    def run_one(name: str) -> None:
        log, pipe = work / f"{name}-measure.log", pipes[name][1]
        try:
            status = run(name, log, pipe)
        finally:
            pipe.close()  # so that who waits for it is told
        keep_log(out, name, log, status)

    with ThreadPoolExecutor(len(pipes)) as threads:
        running = [threads.submit(run_one, name) for name in pipes]
        served = {name: pipe for name, (pipe, _) in pipes.items() if received(pipe)}
        try:
            yield served
        finally:
            for pipe in served.values():
                put(pipe, None)
            for each in running:
                each.result()


def received(pipe: Connection) -> Any:
    """What comes through the pipe; None, and the pipe is closed, if its engine has ended."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        pipe.close()
        return None


def put(pipe: Connection, question: object) -> Any:
    """The answer of an engine that still runs."""
    with suppress(OSError):
        pipe.send(question)
    return received(pipe)


def ask_in_turn(pipes: dict[str, Connection], *question: object) -> dict[str, Any]:
    """The answers of the engines that still run, each asked when the one before has answered."""
    answers = {name: put(pipe, question) for name, pipe in pipes.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def ask_at_once(pipes: dict[str, Connection], *question: object) -> dict[str, Any]:
    """The answers of the engines that still run, all asked before one has answered."""
    for pipe in pipes.values():
        with suppress(OSError):
            pipe.send(question)
    answers = {name: received(pipe) for name, pipe in pipes.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def difference(answers: Answers, others: Answers) -> Figures:
    """By prompt: of log-probabilities the mean distance, the share of equal most likely tokens, equal new tokens."""
    found: Figures = {"prompt": [], "mean_abs_logprob": [], "same_likely": [], "equal_tokens": []}
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


def compare(
    file: Path, pairs: Iterable[tuple[str, str]], answers: Answers, new_tokens: Callable[[str], int]
) -> Pairs:  # fmt: skip
    """Of those pairs of engines of which both answered, how far apart they are, also written and printed."""
    found = {
        (name, other): difference(answers[name]["answers"], answers[other]["answers"])
        for name, other in pairs
        if name in answers and other in answers
    }
    for (name, other), figures in found.items():
        write(file, {"engine": name, "beside": other, "new_tokens": new_tokens(name)} | figures)
        cells = (
            f"{length}: {apart:.4f} {same:.3f} {equal:>2}"
            for length, apart, same, equal in zip(*figures.values(), strict=True)
        )
        print(f"{name:>18} beside {other:12}" + "".join(f"{cell:>26}" for cell in cells))
    print("by prompt: mean |Δ| of log-probabilities, share of equal most likely tokens, equal new tokens")
    return found


def alike(found: Pairs, names: tuple[str, ...], new_tokens: int, engine: str) -> dict[str, bool]:
    """What has to hold of these pairs: those whose names begin so answer alike, and xmla is not far from bfloat16."""
    wanted = {
        f"{name} answers as {other}": min(figures["same_likely"]) >= SAME_LIKELY
        for (name, other), figures in found.items()
        if name.startswith(names)
    }
    if ("xmla-graphs", "xmla") in found:
        equal = found["xmla-graphs", "xmla"]["equal_tokens"]
        wanted["graphs give the tokens of eager"] = equal == [new_tokens] * len(equal)
    pairs = ("xmla", "own-bf16"), ("own", "own-bf16"), ("own-chunks", "own")
    if all(pair in found for pair in pairs):
        ours, own, floor = (found[pair]["mean_abs_logprob"] for pair in pairs)
        near = [a <= FARTHER * b + c for a, b, c in zip(ours, own, floor, strict=True)]
        wanted[f"xmla is as near to bfloat16 as {engine}'s own kernels"] = all(near)
    return wanted


def conclude(file: Path, holds: dict[str, bool], complete: bool) -> None:
    """Write and print the verdicts and exit: 1 if one does not hold or an engine gave no answers."""
    write(file, {"holds": holds})
    for what, right in holds.items():
        print(f"{'yes' if right else 'NO '} {what}")
    raise typer.Exit(code=int(not (all(holds.values()) and complete)))
