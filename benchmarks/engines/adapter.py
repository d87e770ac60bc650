"""What commands ask of vLLM and of SGLang: everything in which they differ, but for the engines' own programs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.engines.answers import Answers, Figures, Pairs, alike
from benchmarks.engines.table import NEW_TOKENS, AnyEngine


class Adapter(ABC):
    name: str  # of the package, and of the file of lines
    title: str
    packages: tuple[str, ...]  # whose releases lines have
    engines: Mapping[str, AnyEngine]
    checked: str  # by default
    pairs: tuple[tuple[str, str], ...]  # each engine and the one that its answers are compared with
    near: tuple[str, ...]  # engines whose names begin so have to answer as the other of a pair does
    kept: tuple[str, ...]  # what lines have of an answer and of its log
    profiled: int  # requests, by default
    entry_points: Mapping[str, Mapping[str, str]] = {}  # besides xmla's
    measuring: Mapping[str, str] = {}  # variables of engines that are measured
    compiling: Mapping[str, str] = {}  # by model: what its program is asked for before an engine's first step

    @property
    def child(self) -> str:
        """The program of an engine."""
        return f"benchmarks.engines.{self.name}.child"

    @abstractmethod
    def environment(self, log: Path) -> dict[str, str]:
        """Variables of every engine's process with this log."""

    @abstractmethod
    def step(self, steps: Iterable[float]) -> float:
        """The step of a case, of its rounds' steps."""

    def alone(self, model: Path) -> AbstractContextManager[None]:
        """No other engine of the model answers within it."""
        return nullcontext()

    def logged(self, log: str) -> dict[str, Any]:
        """What an engine's log tells."""
        return {}

    def again(self, answers: Answers) -> Figures:
        """Answers to requests that were asked again, beside the first ones; none if there are no such requests."""
        return {}

    @abstractmethod
    def holds(self, name: str, answer: dict[str, Any], release: str) -> dict[str, bool]:
        """What has to hold of an engine of this release."""

    def holds_beside(self, found: Pairs, answers: Answers) -> dict[str, bool]:
        """What has to hold of pairs of engines, besides that they answer alike."""
        return {}

    def verdicts(self, found: Pairs, answers: Answers, release: str) -> dict[str, bool]:
        """What has to hold, of what ran."""
        wanted = {
            f"{name}: {what}": right
            for name, answer in answers.items()
            for what, right in self.holds(name, answer, release).items()
        }
        return wanted | self.holds_beside(found, answers) | alike(found, self.near, NEW_TOKENS, self.title)
