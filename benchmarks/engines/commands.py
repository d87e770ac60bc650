"""Commands over engines of vLLM or SGLang: `check`, `speed` and `profile`."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.engines import entry_points, processes
from benchmarks.engines.adapter import Adapter
from benchmarks.engines.answers import ask_all, compare, conclude
from benchmarks.engines.cases import time_cases, write_kernels
from benchmarks.engines.lines import begin, write

ROOT = Path(__file__).parents[2]
MAKING, COMPILING = 120, 240  # seconds that a model may take, and what nvcc compiles for it
ENDING = 30  # seconds in which a case ends that was thought to be faster, kernels are noted, and engines end
MEASURED = "xmla-graphs,own-graphs"  # engines that are measured, by default

Out = Annotated[Path, typer.Option(help="Folder of the JSON lines and logs.", file_okay=False)]
Commit = Annotated[str | None, typer.Option(help="Commit to record when this is not a git checkout.")]
Seconds = Annotated[int, typer.Option(min=1, help="The most that an engine may take.")]


@dataclass(frozen=True, slots=True)
class Run:
    """A command's run of engines over one model, in a folder of work."""

    adapter: Adapter
    out: Path
    names: list[str]
    work: Path

    @classmethod
    def of(cls, adapter: Adapter, out: Path, engines: str, work: Path | None) -> "Run":
        work = work or Path(tempfile.gettempdir()) / f"xmla-{adapter.name}"
        return cls(adapter, out, engines.split(","), work)

    def __post_init__(self) -> None:
        if len({self.adapter.engines[name].kind for name in self.names}) > 1:
            raise typer.BadParameter(f"{', '.join(self.names)} serve several models", param_hint="--engines")

    @property
    def kind(self) -> str:
        """The model that these engines serve."""
        return self.adapter.engines[self.names[0]].kind

    def environment(self, name: str) -> dict[str, str]:
        return self.adapter.engines[name].environment()

    def child(
        self, log: Path, seconds: float, environment: dict[str, str], *words: object, pipe: Connection | None = None
    ) -> int:
        """The exit status of an engine's program with these words, in an environment with xmla's entry points."""
        installed = log.parent / "installed"
        entry_points.write(installed, **self.adapter.entry_points)
        path = os.pathsep.join([str(ROOT), str(installed), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | self.adapter.environment(log) | environment | {"PYTHONPATH": path}
        return processes.run_engine(["-m", self.adapter.child, *words], log, environment, seconds, pipe)

    def model(self) -> Path:
        """The model, made if it is not there."""
        model = self.work / f"model-{self.kind}"
        if not (model / "config.json").exists():
            self.work.mkdir(parents=True, exist_ok=True)
            log = self.work / "model.log"
            if status := self.child(log, MAKING, {}, "model", model, "--kind", self.kind):
                print(log.read_text()[-3000:])
                raise typer.Exit(code=status)
            if command := self.adapter.compiling.get(self.kind):
                self.compile(command)
        return model

    def compile(self, command: str) -> None:
        """What each engine would compile in its first steps; it still does what fails here."""
        begun, log = time.monotonic(), self.work / "kernels.log"
        status = self.child(log, COMPILING, {}, command)
        failure = f"\n{log.read_text()[-3000:]}" if status else ""
        told = f"exit status {status} after {time.monotonic() - begun:.0f} s{failure}"
        print(f"{self.adapter.title}'s kernels: {told}", flush=True)

    def begin(self, command: str, commit: str | None, model: Path) -> Path:
        """The file of a command's lines, which says where they come from."""
        file = self.out / f"{self.adapter.name}.jsonl"
        releases = {package: version(package) for package in self.adapter.packages}
        begin(file, f"python -m benchmarks.engines {self.adapter.name} {command}", commit, model, releases)
        return file

    @contextmanager
    def measured(
        self, contexts: str, requests: str, start: float, seconds: float
    ) -> Iterator[tuple[Path, processes.Running]]:
        """The model, and the engines that are ready for such cases after `start` seconds, for so many seconds."""

        def run(name: str, log: Path, pipe: Connection) -> int:
            environment = self.environment(name) | {**self.adapter.measuring}
            words = "measure", name, pipe.fileno(), contexts, requests
            return self.child(log, start + seconds + ENDING, environment, *words, pipe=pipe)

        with (
            processes.ready(self.out, self.work, self.names, run, self.model, start) as ready,
            self.adapter.alone(model := self.model()),
        ):
            yield model, ready


def commands(adapter: Adapter) -> typer.Typer:
    """The commands over an adapter's engines."""
    app = typer.Typer(help=f"{adapter.title}'s engines on a GPU: xmla's plugin beside {adapter.title}'s own kernels.")
    Engines = Annotated[str, typer.Option(help=f"Of {', '.join(adapter.engines)}.")]

    @app.command()
    def check(
        out: Out, commit: Commit = None, engines: Engines = adapter.checked, seconds: Seconds = 240, at_once: int = 4,
        work: Path | None = None,
    ) -> None:  # fmt: skip
        """Ask every engine the same, several at once; exit status 1 if one failed or answers are too far apart."""
        ran = Run.of(adapter, out, engines, work)
        model = ran.model()
        file = ran.begin("check", commit, model)

        def ask(name: str, log: Path, answer: Path) -> int:
            return ran.child(log, seconds, ran.environment(name), "answer", name, model, answer)

        answers = ask_all(file, ran.work, ran.names, at_once, ask, adapter.kept, adapter.logged)
        for name, answered in answers.items():
            if figures := adapter.again(answered["answers"]):
                write(file, {"engine": name, "beside": "itself"} | figures)
                print(f"{name:>18} again: " + ", ".join(f"{key} {values}" for key, values in figures.items()))
        found = compare(file, adapter.pairs, answers, lambda name: adapter.engines[name].new)
        holds = adapter.verdicts(found, answers, version(adapter.name))
        conclude(file, holds, len(answers) == len(ran.names))

    @app.command()
    def speed(
        out: Out, commit: Commit = None, engines: Engines = MEASURED, contexts: str = "4096,32768",
        requests: str = "1,8,64", seconds: Annotated[int, typer.Option(min=1)] = 180, start: int = 150,
        work: Path | None = None,
    ) -> None:  # fmt: skip
        """All engines at once, which take turns in each round of a case, smallest case first; then the kernels of one
        request of each context. `start` seconds at most until they are ready, `seconds` for the cases.
        """
        ran = Run.of(adapter, out, engines, work)
        with ran.measured(contexts, requests, start, seconds) as (model, ready):
            file = ran.begin("speed", commit, model)
            complete = time_cases(file, ran.names, ready, contexts, requests, seconds, adapter.step)
        raise typer.Exit(code=int(not complete))

    @app.command()
    def profile(
        out: Out, commit: Commit = None, engines: Engines = MEASURED, context: int = 4096,
        requests: int = adapter.profiled, seconds: Seconds = 120,
        work: Path | None = None,
    ) -> None:  # fmt: skip
        """Where the GPU's time goes: the kernels of each engine, one engine after the other."""
        ran = Run.of(adapter, out, engines, work)
        with ran.measured(str(context), str(requests), seconds, ENDING) as (model, ready):
            file = ran.begin("profile", commit, model)
            answers = processes.ask_in_turn(ready, 0, "kernels", context, requests)
            write_kernels(file, answers, context, requests)
        raise typer.Exit(code=int(len(answers) < len(ran.names)))

    return app
