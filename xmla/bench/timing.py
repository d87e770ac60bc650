"""The one timer: CUDA-graph replays over rotated inputs, variants interleaved, median with minimum and maximum."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

REPLAY_US = 2000.0  # a replay lasts at least this long, so that its launch does not count
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of device time a call."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        return cls(statistics.median(samples), min(samples), max(samples))

    def rounded(self) -> list[float]:
        """Median, minimum and maximum, as results have them."""
        return [round(us, 2) for us in (self.median, self.minimum, self.maximum)]


def _elapsed_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _capture(call: Callable[[int], Any], sets: int, repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # By default what another thread asks of CUDA spoils a capture, and JAX's threads free what they no longer need.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            for index in range(sets):
                call(index)
    return graph


def replays(call: Callable[[int], Any], sets: int) -> Callable[[], float]:
    """A function that gives the microseconds a call of one replay of a captured graph of calls over all `sets`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(sets):
            call(index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = _capture(call, sets, 1)
    graph.replay()
    repeats = max(1, round(REPLAY_US / _elapsed_us(graph)))
    if repeats > 1:
        graph = _capture(call, sets, repeats)
    return lambda: _elapsed_us(graph) / (repeats * sets)


def measure(variants: Mapping[str, Callable[[int], Any]], sets: int) -> dict[str, Timing]:
    """Time each variant, a function of the index of an input set; the `sets` together should pass the L2 cache."""
    samplers = {name: replays(call, sets) for name, call in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(ROUNDS):
        for name, sample in samplers.items():
            samples[name].append(sample())
    return {name: Timing.of(times) for name, times in samples.items()}
