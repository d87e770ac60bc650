"""What harnesses of engines on a GPU have alike: the answers of several at once, and what has to hold of them; speeds,
in turns.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

Out = Annotated[Path, typer.Option(help="Folder of the JSON lines and logs.", file_okay=False)]
Commit = Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")]
Seconds = Annotated[int, typer.Option(min=1, help="The most that an engine may take.")]
Answers = dict[str, Any]  # of an engine, by its name
Figures = dict[str, list[Any]]  # by prompt
Pairs = dict[tuple[str, str], Figures]  # of an engine beside another
Answered = dict[tuple[int, int, int], list[list[int]]]  # by context, requests and number of the prompts: new tokens

# Several GPUs and drafts change the order of sums; this share of a prompt's most likely tokens has to stay.
SAME_LIKELY = 0.9
SAME_TOKENS = 0.5  # of the rounds of a case; near ties change some answers from their place on
# xmla may be this much farther from bfloat16 than an engine's own kernels are, besides what another chunking changes.
FARTHER = 1.25
ROUNDS = 12  # of a case
COMPILED = 1 << 17  # tokens of a case's prompts that an engine has had before it is ready
ENDING = 30  # seconds in which a case ends that was thought to be faster, kernels are noted, and engines end


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


def run_engine(
    words: Iterable[object], log: Path, environment: Mapping[str, str], seconds: float, pipe: Connection | None
) -> int:  # fmt: skip
    """The exit status of a Python program, which inherits the pipe; it has to end when that is closed here."""
    command = ["timeout", "-k", "10", str(seconds), sys.executable, *map(str, words)]
    inherited = () if pipe is None else (pipe.fileno(),)
    with log.open("w") as text, subprocess.Popen(
        command, env=environment, stdout=text, stderr=subprocess.STDOUT, pass_fds=inherited
    ) as process:  # fmt: skip
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(1)
            if pipe is not None and pipe.closed:
                process.terminate()


@dataclass(frozen=True, slots=True)
class Ready:
    """The pipe to an engine that is ready, and its process."""

    pipe: Connection
    process: int


Engines = dict[str, Ready]


@contextmanager
def ready(
    out: Path, work: Path, names: list[str], run: Callable[[str, Path, Connection], int], model: Callable[[], Path],
    seconds: float,
) -> Iterator[Engines]:  # fmt: skip
    """The engines that are ready in so many seconds; others are ended. Behind this they are told to end.

    All start at once, before there is a model. `run(name, log, pipe)` gives the exit status of an engine that takes the
    model's folder from the pipe, puts its process there once it is ready, and then answers what comes until it is None.
    """
    deadline = time.monotonic() + seconds
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
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
        try:
            model_folder, engines = str(model()), Engines()
            for pipe, _ in pipes.values():
                with suppress(OSError):
                    pipe.send(model_folder)
            for name, (pipe, end) in pipes.items():
                in_time = pipe.poll(max(0, deadline - time.monotonic()))
                if in_time and (process := received(pipe)) is not None:
                    engines[name] = Ready(pipe, process)
                if not in_time:
                    print(f"{name}: not ready after {seconds:.0f} s", flush=True)
                    end.close()
            yield engines
        finally:
            for pipe, _ in pipes.values():
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


def threads_of(process: int) -> Iterator[int]:
    """Threads of a process and of all that it started."""
    parents = dict[int, int]()
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
    family = {process}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for member in family:
        with suppress(OSError):
            yield from map(int, os.listdir(f"/proc/{member}/task"))


def place(engines: Engines, name: str) -> None:
    """Half of the cores for an engine whose turn it is, the same for any; for the others the rest."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    for each, engine in engines.items():
        for thread in threads_of(engine.process):
            with suppress(OSError):
                os.sched_setaffinity(thread, cores[:half] if each == name else cores[half:] or cores)


def ask_in_turn(engines: Engines, turn: int, *question: object) -> dict[str, Any]:
    """The answers of the engines that still run, each asked when the one before has answered.

    In the next turn another one begins.
    """
    names = [*engines]
    first = turn % max(1, len(names))
    answers = dict[str, Any]()
    for name in [*names[first:], *names[:first]]:
        place(engines, name)
        answers[name] = put(engines[name].pipe, question)
    return {name: answers[name] for name in names if answers[name] is not None}


def ask_at_once(engines: Engines, *question: object) -> dict[str, Any]:
    """The answers of the engines that still run, all asked before one has answered."""
    for engine in engines.values():
        with suppress(OSError):
            engine.pipe.send(question)
    answers = {name: received(engine.pipe) for name, engine in engines.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def cases_of(contexts: Iterable[int], requests: Iterable[int]) -> list[tuple[int, int]]:
    """Contexts and numbers of requests, by their product."""
    cases = [(context, count) for context in sorted(contexts) for count in sorted(requests)]
    return sorted(cases, key=lambda case: case[0] * case[1])


def few_of(context: int, requests: int) -> int:
    """How many of the requests have prompts of COMPILED tokens together, or one."""
    return min(requests, max(COMPILED // context, 1))


def equal_before(tokens: list[int], others: list[int]) -> int:
    """How many tokens are equal before the first that differs."""
    return [*(a == b for a, b in zip(tokens, others, strict=True)), False].index(False)


def same_tokens(answered: Answered, case: tuple[int, int, int], tokens: list[list[int]]) -> float:
    """What share of a round's tokens are those of the first round of its prompts, before the first that differs.

    Behind cached keys an engine that lost some would be fast, too.
    """
    first = answered.setdefault(case, tokens)
    return round(sum(map(equal_before, tokens, first)) / sum(map(len, first)), 4)


def case_of(rounds: list[dict[str, float]], step: Callable[[Iterable[float]], float]) -> dict[str, Any]:
    """The figures of a case from its rounds.

    They are `step` of the rounds' steps, the fastest prefill, medians of passes, and the fewest tokens that were cached
    and that are those of the prompts' first round. There is no step, and why, if a longer request took no longer in
    some round, or if answers changed.
    """
    by_round = {
        key: [each[key] for each in rounds if key in each]
        for key in ("step_us", "forward_us", "prefill_tokens_per_s", "prefill_forward_ms")
    }
    steps, same = by_round["step_us"], min(each["same_tokens"] for each in rounds)
    case: dict[str, Any]
    if min(steps) <= 0:
        case = {"refused": "more steps took no longer"}
    elif same < SAME_TOKENS:
        case = {"refused": "answers behind cached prompts are not those of the first round"}
    else:
        case = {"step_us": round(step(steps), 2)}
    case |= {
        "forward_us": round(median(by_round["forward_us"]), 2),
        "prefill_tokens_per_s": max(by_round["prefill_tokens_per_s"]),
        "prefill_forward_ms": round(median(by_round["prefill_forward_ms"]), 3),
        "cached_tokens": min(each["cached_tokens"] for each in rounds),
        "same_tokens": same,
    }
    return case | {f"{key}_by_round": figures for key, figures in by_round.items()}


@dataclass(slots=True)
class Turns:
    """Rounds of cases, as many as there is time for.

    A round of a case has new prompts, whose prefill is timed, and steps behind them. If they are long, prompts are new
    only until each engine has begun a round, and then are cached. Known before a round is what rounds have told:
    `rate`, tokens/s of the slowest prefill, and `steps`, seconds of the last round without its prefills.
    """

    deadline: float
    rate: float = float("inf")
    steps: float = 0

    def play(self, engines: Engines, context: int, requests: int) -> list[dict[str, Any]]:
        """The engines' answers, by round: each begins as many as another. Empty if there is no time for one of each."""
        running, each = engines, max(1, len(engines))
        rounds: list[dict[str, Any]] = []
        while running and len(rounds) < max(ROUNDS // each, 1) * each:
            new = context * requests <= COMPILED or len(rounds) < each
            begun = time.monotonic()
            needs = self.steps + new * len(running) * context * requests / self.rate
            if begun + (0 if len(rounds) % each else each * needs) >= self.deadline:
                break
            question = "round", context, requests, len(rounds) if new else each - 1, new
            answers = ask_in_turn(running, len(rounds), *question)
            rates = [answer["prefill_tokens_per_s"] for answer in answers.values() if "prefill_tokens_per_s" in answer]
            self.rate = min([self.rate, *rates])
            self.steps = max(0, time.monotonic() - begun - sum(context * requests / rate for rate in rates))
            rounds.append(answers)
            running = {name: engine for name, engine in running.items() if "step_us" in answers.get(name, ())}
        return rounds


def write_kernels(file: Path, answers: dict[str, Any], context: int, requests: int) -> None:
    for name, rows in answers.items():
        for row in rows:
            write(file, {"engine": name, "context": context, "requests": requests} | row)
            print(f"{name:>14} {row['phase']:>8} {row['us']:>10} µs {row['launches']:>5} × {row['kernel'][:80]}")


def time_cases(
    file: Path, names: list[str], engines: Engines, contexts: str, requests: str, seconds: float,
    step: Callable[[Iterable[float]], float],
) -> bool:  # fmt: skip
    """Write each case's figures when its rounds are over, smallest first, then kernels of one request of each context.

    Engines answer ("round", context, requests, number of the prompts, are they new?) with a round's figures or why they
    have none, and ("kernels", context, requests) with lines. Whether no engine and no case was refused.
    """
    turns = Turns(time.monotonic() + seconds)
    for name in names:
        if name not in engines:
            write(file, {"engine": name, "refused": "the engine was not ready"})
    complete = len(engines) == len(names)
    for context, count in cases_of(numbers(contexts), numbers(requests)):
        running = {name: engine for name, engine in engines.items() if not engine.pipe.closed}
        rounds = turns.play(running, context, count)
        for name in engines:
            told = [answers[name] for answers in rounds if name in answers]
            ran = [answer for answer in told if "step_us" in answer]
            line = {"engine": name, "context": context, "requests": count} | (case_of(ran, step) if ran else {})
            if engines[name].pipe.closed:
                line |= {"refused": "the engine ended"}
            elif not rounds:
                line |= {"skipped": "no time left"}
            elif len(ran) < len(told):
                line |= told[-1]
            complete &= "refused" not in line
            write(file, line)
            print(" ".join(f"{key} {value}" for key, value in line.items() if "round" not in key), flush=True)
    for turn, context in enumerate(numbers(contexts)):
        if time.monotonic() < turns.deadline:
            write_kernels(file, ask_in_turn(engines, turn, "kernels", context, 1), context, 1)
    return complete and not any(engine.pipe.closed for engine in engines.values())


def difference(answers: Answers, others: Answers) -> Figures:
    """Mean distance of log-probabilities, share of equal most likely tokens, equal new tokens, by prompt."""
    found: Figures = {"prompt": [], "mean_abs_logprob": [], "same_likely": [], "equal_tokens": []}
    for length, answer in answers.items():
        other = others[length]
        apart = [abs(a - b) for a, b in zip(answer["logprobs"], other["logprobs"], strict=True)]
        same = [a == b for a, b in zip(answer["likely"], other["likely"], strict=True)]
        found["prompt"].append(int(length))
        found["mean_abs_logprob"].append(round(sum(apart) / len(apart), 5))
        found["same_likely"].append(round(sum(same) / len(same), 4))
        found["equal_tokens"].append(equal_before(answer["tokens"], other["tokens"]))
    return found


def compare(
    file: Path, pairs: Iterable[tuple[str, str]], answers: Answers, new_tokens: Callable[[str], int]
) -> Pairs:  # fmt: skip
    """How far apart pairs of engines are that both answered, also written and printed."""
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
