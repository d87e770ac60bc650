"""Latencies of requests that come to vLLM's engines by and by: the command `trace`."""

import os
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.engines import processes
from benchmarks.engines.commands import MEASURED, Commit, Out, Run, Seconds
from benchmarks.engines.lines import write
from benchmarks.engines.vllm.adapter import Vllm

LASTING = 12  # seconds of a trace
ENDING = 10  # seconds that are left for engines to end

Engines = Annotated[str, typer.Option(help=f"Of {', '.join(Vllm.engines)}.")]


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


def trace(
    out: Out, commit: Commit = None, engines: Engines = MEASURED, rates: str = "8",
    rounds: Annotated[int, typer.Option(min=1)] = 3, seconds: Seconds = 300, apart: bool = False,
    work: Path | None = None,
) -> None:  # fmt: skip
    """All engines at once, which take turns: each plays the same trace, of so many requests a second, with new prompts.

    `apart`: each has a GPU and its share of the cores for itself, and they play at the same time. A first round, twice
    as fast, does not count. There are `rounds` of each rate, as long as the seconds last. What each step took is in
    FOLDER/steps.jsonl.
    """
    begun, ran = time.monotonic(), Run.of(Vllm(), out, engines, work)
    names = ran.names
    places = dict(zip(names, places_of(len(names)), strict=True)) if apart else {}

    def run(name: str, log: Path, pipe: Connection) -> int:
        gpu, cores = places.get(name, ({}, ""))
        # Else an engine would have the kernels that the one before it in a round has compiled.
        environment = ran.environment(name) | {"TRITON_CACHE_DIR": str(ran.work / f"{name}-triton")} | gpu
        left = seconds - (time.monotonic() - begun)
        words = "serve", name, pipe.fileno(), *(("--cores", cores) if cores else ())
        return ran.child(log, left, environment, *words, pipe=pipe)

    asked = [(float(rate), round(LASTING * float(rate))) for rate in rates.split(",")]
    played: dict[tuple[str, float], list[dict[str, Any]]] = {(name, rate): [] for name in names for rate, _ in asked}
    ended = False
    with processes.ready(out, ran.work, names, run, ran.model, seconds) as ready:
        file = ran.begin("trace", commit, ran.model())
        for number, (rate, requests) in enumerate([asked[0], *(each for each in asked for _ in range(rounds))]):
            left = seconds - (time.monotonic() - begun)
            if left < 1.5 * LASTING * (1 if apart else len(names)) + ENDING:
                break
            question = "play", requests, rate, number, 1 if number else 2
            answers = (
                processes.ask_at_once(ready, *question) if apart else processes.ask_in_turn(ready, number, *question)
            )
            ended |= len(answers) < len(names)
            for name, told in answers.items():
                played[name, rate] += [told] if number else []
                show_round(name, number, rate, told)
                write(out / "steps.jsonl", {"engine": name, "rate": rate, "round": number} | told)
    for (name, rate), told in played.items():
        line = {"engine": name, "trace": {"requests": round(LASTING * rate), "rate": rate, "rounds": len(told)}}
        line["trace"] |= {"apart": True} if apart else {}
        line |= latencies(told) if told else {"refused": "the engine ended" if ended else "no time left"}
        write(file, line)
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
