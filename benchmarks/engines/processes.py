"""Engines as processes: each is started with a pipe, and asked through it in its turn."""

import fcntl
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
from typing import Any

from benchmarks.engines.lines import keep_log


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


Running = dict[str, Ready]  # by name


@contextmanager
def ready(
    out: Path, work: Path, names: list[str], run: Callable[[str, Path, Connection], int], model: Callable[[], Path],
    seconds: float,
) -> Iterator[Running]:  # fmt: skip
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
            model_folder, engines = str(model()), Running()
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


def place(engines: Running, name: str) -> None:
    """Half of the cores for an engine whose turn it is, the same for any; for the others the rest."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    for each, engine in engines.items():
        for thread in threads_of(engine.process):
            with suppress(OSError):
                os.sched_setaffinity(thread, cores[:half] if each == name else cores[half:] or cores)


def ask_in_turn(engines: Running, turn: int, *question: object) -> dict[str, Any]:
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


def ask_at_once(engines: Running, *question: object) -> dict[str, Any]:
    """The answers of the engines that still run, all asked before one has answered."""
    for engine in engines.values():
        with suppress(OSError):
            engine.pipe.send(question)
    answers = {name: received(engine.pipe) for name, engine in engines.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


@contextmanager
def locked(file: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock between processes: alone, or with LOCK_SH beside others that hold it so."""
    with file.open("w") as lock:
        fcntl.flock(lock, how)
        yield
