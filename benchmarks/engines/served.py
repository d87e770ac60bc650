"""One engine on a GPU, in a process of its own because a plugin changes an engine for good: what it is asked for.

`Served` is an engine that has started. A program of one is `commands` and its own `answer`; `processes.py` starts it.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol
from zlib import crc32  # the generator takes 32 bits of a seed with all their differences

import torch
import typer

from benchmarks.engines.cases import Answered, cases_of, few_of, numbers, same_tokens
from benchmarks.engines.table import VOCABULARY

WARM = 8  # tokens of each request before decode is timed
TOKENS = 64  # of each request that are timed
CHUNK = 8192  # tokens of a prefill
COMPILING, PROFILED = -1, (-2, -3)  # numbers of prompts that no round has

Prompts = list[list[int]]
Rows = list[dict[str, Any]]


class Served(Protocol):
    """An engine that has started. It answers greedily, each request with as many tokens as are asked for.

    A step is timed on the host and is None if some request waited for others, with how many of the prompts' tokens were
    cached. Passes are milliseconds on the GPU since the last call; `ahead`: from now on it does not wait for the host.
    Decodes are the last TOKENS passes that decode so many requests; none if fewer do. A profile has the kernels that
    take longest together, and `warm_profile` runs what they are of, so that none is compiled then.
    """

    shown: int  # decode steps whose kernels are shown

    def ask(self, prompts: Prompts, tokens: int) -> list[list[int]]: ...
    def seconds_of(self, prompts: Prompts, tokens: int) -> float: ...
    def step_of(self, prompts: Prompts) -> tuple[float, int] | None: ...
    def passes(self, ahead: bool = False) -> list[float]: ...
    def decodes(self, requests: int) -> list[float]: ...
    def warm_profile(self, prompts: Prompts) -> None: ...
    def profile(self, prompts: Prompts, tokens: int) -> Rows: ...


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


def new_prompts(context: int, requests: int, number: int) -> Prompts:
    """Prompts of a case's round, which begin like no other prompts of any round."""
    return [prompt(context, crc32(f"{context} {requests} {number} {each}".encode())) for each in range(requests)]


def compile_cases(engine: Served, contexts: list[int], counts: list[int]) -> None:
    """Run each case once with few prompts, so that no round compiles or tunes kernels."""
    for context, count in cases_of(contexts, counts):
        few = new_prompts(context, few_of(context, count), COMPILING)
        engine.ask(few, 1)
        engine.ask([*islice(cycle(few), count)], WARM)


def timed_round(
    engine: Served, answered: Answered, context: int, requests: int, number: int, new: bool
) -> dict[str, Any]:  # fmt: skip
    """A prefill of prompts if they are new; behind their cached keys, where all start at once, steps and their passes.

    A step is timed on the host. Passes are those of further steps, in which the GPU does not wait for the host. Keys of
    older prompts make room by themselves: an engine that is told to flush them gives torch's memory back to the driver
    too, and the prefill would wait for it.
    """
    prompts, figures = new_prompts(context, requests, number), dict[str, Any]()
    engine.passes()
    if new:
        figures["prefill_tokens_per_s"] = round(context * requests / engine.seconds_of(prompts, 1))
        figures["prefill_forward_ms"] = round(sum(engine.passes()), 2)
    if step := engine.step_of(prompts):
        engine.passes(ahead=True)
        tokens = engine.ask(prompts, WARM + TOKENS)
        if decodes := engine.decodes(requests):
            microseconds, cached = step
            return {
                "step_us": round(microseconds, 1), "forward_us": round(1e3 * median(decodes), 1),
                "cached_tokens": cached, "same_tokens": same_tokens(answered, (context, requests, number), tokens),
            } | figures  # fmt: skip
    return {"refused": f"the cache does not hold {requests} requests at once"}


def kernels_of(engine: Served, context: int, requests: int) -> Rows:
    """Kernels of a prefill of new prompts and of decode steps behind them, by time."""
    warm, shown = (new_prompts(context, requests, number) for number in PROFILED)
    engine.warm_profile(warm)
    return [
        {"phase": phase} | kernel
        for phase, tokens in (("prefill", 1), ("decode", engine.shown))
        for kernel in engine.profile(shown, tokens)
    ]


def answer_questions(pipe: Connection, **functions: Callable[..., Any]) -> None:
    """Tell that the engine is ready; then answer each (function, *arguments) that comes until it is None."""
    pipe.send(os.getpid())
    while (question := pipe.recv()) is not None:
        what, *arguments = question
        pipe.send(functions[what](*arguments))


def commands(
    load: Callable[[], None],
    start_for: Callable[[str, Path, list[int], list[int]], AbstractContextManager[Served]],
    finish: Callable[[Path, str], None] = lambda folder, kind: None,
) -> typer.Typer:
    """The program of an engine: `model` and `measure`, to which it adds `answer`.

    `load` imports the engine. `start_for(name, model, contexts, requests)` starts one that has room for any such
    case. `finish(folder, kind)` changes a model that was saved into one that the engine reads.
    """
    app = typer.Typer(add_completion=False)

    @app.command()
    def model(folder: Path, kind: str = "v32", device: str = "cuda") -> None:
        """Make a model."""
        from benchmarks.engines import models

        models.save_large(folder, kind, device)
        finish(folder, kind)

    @app.command()
    def measure(name: str, pipe: int, contexts: str, requests: str) -> None:
        """Once ready for such cases, answer what comes through the pipe: rounds of a case, kernels of one."""
        asked, lengths, counts = Connection(pipe), numbers(contexts), numbers(requests)
        load()  # while the model is written
        with start_for(name, Path(asked.recv()), lengths, counts) as engine:
            compile_cases(engine, lengths, counts)
            answer_questions(asked, round=partial(timed_round, engine, {}), kernels=partial(kernels_of, engine))

    return app
