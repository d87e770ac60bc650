"""How long the parts of a step take on the GPU, apart from what all engines have alike: the command `parts`."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.engines import processes
from benchmarks.engines.cases import cases_of, numbers
from benchmarks.engines.commands import MEASURED, Commit, Out, Run
from benchmarks.engines.lines import write
from benchmarks.engines.vllm.adapter import Vllm

WAIT, END = "spin_kernel", "pass_ends"  # kernels before and behind a pass
PARTS = "selection", "attention"
ROUNDS = 4  # of a case: in the first two prompts are new, whose prefill comes before
ENDING = 10  # seconds that are left for engines to end

Engines = Annotated[str, typer.Option(help=f"Of {', '.join(Vllm.engines)}.")]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that ran, in nanoseconds."""

    name: str
    begun: int
    ended: int


def covered(kernels: Iterable[Kernel]) -> int:
    """Nanoseconds in which at least one of the kernels ran: some begin before the one before them has ended."""
    total = until = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.begun):
        total += max(0, kernel.ended - max(until, kernel.begun))
        until = max(until, kernel.ended)
    return total


def passes_of(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """The kernels of each pass, between the wait and the mark behind it, which is its last."""
    passes, current = list[list[Kernel]](), None
    for kernel in sorted(kernels, key=lambda kernel: kernel.begun):
        if WAIT in kernel.name:
            current = [Kernel(WAIT, kernel.ended, kernel.ended)]
        elif current is not None:
            current.append(kernel)
            if kernel.name == END:
                passes.append(current)
                current = None
    return passes


def divided(kernels: list[Kernel]) -> dict[str, list[list[Kernel]]]:
    """The kernels of a pass by part, apart for each layer that has it; what is in none is `other`."""
    parts: dict[str, list[list[Kernel]]] = {part: [] for part in (*PARTS, "other")}
    parts["other"].append([])
    inside = None
    for kernel in kernels[1:-1]:
        part, _, what = kernel.name.rpartition("_")
        if part in PARTS and what == "begins":
            inside = part
            parts[part].append([])
        elif part in PARTS and what == "ends":
            inside = None
        else:
            parts[inside or "other"][-1].append(kernel)
    return parts


def figures(passes: list[list[Kernel]]) -> dict[str, Any]:
    """Microseconds of passes, of the kernels of each part in them, and in which no kernel ran: medians, and the least.

    Also each part's launches, and the medians of the kernels that take longest, with their launches in a pass.
    """
    of_parts = [divided(kernels) for kernels in passes]
    line: dict[str, Any] = {"passes": len(passes), "pass_us": told([k[-1].begun - k[0].ended for k in passes])}
    for part in (*PARTS, "other"):
        line[f"{part}_us"] = told([sum(map(covered, parts[part])) for parts in of_parts])
        line[f"{part}_launches"] = sum(map(len, of_parts[-1][part]))
    line["between_us"] = told([k[-1].begun - k[0].ended - covered(k[1:-1]) for k in passes])
    line["kernels"] = [row for part in (*PARTS, "other") for row in longest([parts[part] for parts in of_parts], part)]
    return line


def told(nanoseconds: list[int]) -> dict[str, float]:
    return {"median": round(median(nanoseconds) / 1e3, 1), "least": round(min(nanoseconds) / 1e3, 1)}


def longest(passes: list[list[list[Kernel]]], part: str, most: int = 12) -> list[dict[str, Any]]:
    totals: list[Counter[str]] = []
    launches: Counter[str] = Counter()
    for layers in passes:
        each = [kernel for kernels in layers for kernel in kernels]
        launches = Counter(kernel.name for kernel in each)
        totals.append(Counter())
        for kernel in each:
            totals[-1][kernel.name] += kernel.ended - kernel.begun
    names = {name: median(total[name] for total in totals) / 1e3 for total in totals for name in total}
    first = sorted(names.items(), key=lambda named: -named[1])[:most]
    return [{"part": part, "kernel": name[:120], "launches": launches[name], "us": round(us, 1)} for name, us in first]


def parts(
    out: Out, commit: Commit = None, engines: Engines = MEASURED, context: int = 4096, requests: str = "1,8,64",
    seconds: Annotated[int, typer.Option(min=1)] = 60, start: int = 150, work: Path | None = None,
) -> None:  # fmt: skip
    """What selection and attention take of a decode's passes, by the kernels between marks; engines take turns.

    Two rounds of a case have new prompts, whose prefill comes before; in the others they are cached. `start` seconds at
    most until engines are ready, `seconds` for the cases.
    """
    ran = Run.of(Vllm(), out, engines, work)

    def run(name: str, log: Path, pipe: Connection) -> int:
        words = "divide", name, pipe.fileno(), context, requests
        return ran.child(log, start + seconds + ENDING, ran.environment(name) | {**Vllm.measuring}, *words, pipe=pipe)

    with processes.ready(out, ran.work, ran.names, run, ran.model, start) as ready:
        file, deadline = ran.begin("parts", commit, ran.model()), time.monotonic() + seconds
        for each in range(ROUNDS):
            for _, count in cases_of([context], numbers(requests)):
                if time.monotonic() > deadline:
                    break
                question = "parts", context, count, min(each, 1), each < 2
                for name, line in processes.ask_in_turn(ready, each, *question).items():
                    write(file, {"engine": name, "context": context, "requests": count, "round": each} | line)
                    shown = {key: value for key, value in line.items() if key != "kernels"}
                    print(name, count, each, shown, flush=True)
        ended = any(engine.pipe.closed for engine in ready.values())
    raise typer.Exit(code=int(ended or len(ready) < len(ran.names)))
