"""`python stand_in_engine.py measure NAME PIPE …`: the program of an engine that answers at once, without a GPU."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engines.served import TOKENS, Prompts, Rows, commands


class StandIn:
    """An engine whose decode step takes 5.04 µs on the host and 2 ms on the GPU, and a prefill half a second."""

    shown = 3

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int, bool]] = []  # prompts, different ones, new tokens, is the GPU ahead?
        self.ahead = False
        self.holds = 64

    def ask(self, prompts: Prompts, tokens: int) -> list[list[int]]:
        self.asked.append((len(prompts), len({*map(tuple, prompts)}), tokens, self.ahead))
        return [[prompt[0]] * tokens for prompt in prompts]

    def seconds_of(self, prompts: Prompts, tokens: int) -> float:
        self.ask(prompts, tokens)
        return 0.5

    def step_of(self, prompts: Prompts) -> tuple[float, int] | None:
        self.ask(prompts, TOKENS)
        return (5.04, 60) if len(prompts) <= self.holds else None

    def passes(self, ahead: bool = False) -> list[float]:
        self.ahead = ahead
        return [9.0, 1.0, 3.0]

    def decodes(self, requests: int) -> list[float]:
        self.ahead = False
        return [2.0, 1.0, 9.0]

    def warm_profile(self, prompts: Prompts) -> None:
        self.ask(prompts, 1)

    def profile(self, prompts: Prompts, tokens: int) -> Rows:
        self.ask(prompts, tokens)
        return [{"kernel": "a kernel", "launches": tokens, "us": 9.5}]


@contextmanager
def start_for(name: str, model: Path, contexts: list[int], counts: list[int]) -> Iterator[StandIn]:
    print(name, model, contexts, counts)
    engine = StandIn()
    yield engine
    print(json.dumps(engine.asked))


if __name__ == "__main__":
    commands(lambda: print("loaded"), start_for)()
