"""The one timer: CUDA-graph replays over rotated inputs, variants interleaved, median with minimum and maximum."""

import statistics
from collections.abc import Callable, Mapping
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


def _elapsed_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _capture(call: Callable[[int], Any], sets: int, repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for index in range(sets):
                call(index)
    return graph


def measure(variants: Mapping[str, Callable[[int], Any]], sets: int) -> dict[str, Timing]:
    """Time each variant, a function of the index of an input set; the `sets` together should pass the L2 cache."""
    graphs = {}
    for name, call in variants.items():
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
        graphs[name] = (graph, repeats * sets)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (graph, calls) in graphs.items():
            samples[name].append(_elapsed_us(graph) / calls)
    return {name: Timing(statistics.median(s), min(s), max(s)) for name, s in samples.items()}
