"""The timer of JAX: GPU time of a case's calls, in turns with PyTorch's, and the host's part of one.

A program is some calls of a case in one `jit`. The GPU's time is the time by which several programs more prolong work
that was queued before them: it keeps the GPU busy until the host has queued all, so that the host's time does not
count, as it does not in a CUDA graph's replay. PyTorch's graph is replayed between JAX's rounds: a GPU that has paused
is faster than one that works without a break, as it does for the times beside peers.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xmla import interop
from xmla.bench.benchmark import Arrays, Benchmark
from xmla.bench.timing import Timing, replays
from xmla.jax_api._all_ops import JAX_OPS

PROGRAM_US = 300.0  # of the calls in a program, at least, but for the most of them
MOST_CALLS = 16
PROGRAMS_US = 12000.0  # of the programs that are queued, at most
MOST_PROGRAMS = 24  # XLA lets the host queue 32 of them
ROUNDS = 5


def each_once(sets: Sequence[Arrays], convert: Callable[[torch.Tensor], Any]) -> list[list[Any]]:
    """The sets with their arrays converted; one that several sets have stays one."""
    arrays = {id(array): array for arrays in sets for array in arrays}
    converted = {key: None if array is None else convert(array) for key, array in arrays.items()}
    return [[converted[id(array)] for array in arrays] for arrays in sets]


@cache
def _busy() -> Callable[[], jax.Array]:
    """A program that keeps the GPU busy for some 20 ms, by reading and writing memory."""
    array = jnp.ones(1 << 28, jnp.float32)  # 1 GiB
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 24, lambda _, y: y + 1, x))
    return lambda: program(array)


class Case:
    """A benchmark's calls by JAX, on the memory of the tensors of `benchmark`, which are dense."""

    def __init__(self, benchmark: Benchmark) -> None:
        # JAX has no strides.
        self.benchmark = replace(benchmark, inputs=each_once(benchmark.inputs, torch.Tensor.contiguous))
        self.inputs = each_once(self.benchmark.inputs, interop.to_jax)
        # Copies: JAX updates in place what it has allocated.
        self.updated = [jnp.array(self.inputs[0][place], copy=True) for place in benchmark.updates]

    def call(self, updated: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results of a call, and the new values of the arrays that it updates."""
        arguments = list(arrays)
        for place, array in zip(self.benchmark.updates, updated, strict=True):
            arguments[place] = array
        results = self.benchmark.call(JAX_OPS, *arguments)
        results = list(results) if isinstance(results, tuple | list) else [results]
        count = len(results) - len(updated)
        return results[:count], results[count:]

    def program(self, calls: int) -> Callable[[], list[Any]]:
        """A function that starts so many calls in one program.

        Each has a first argument of its own: XLA would make two calls on the same arguments once.
        """
        sets = [self.inputs[index % len(self.inputs)] for index in range(calls)]

        def run(updated: Sequence[Any], firsts: Sequence[Any], rests: Sequence[Sequence[Any]]) -> Any:
            every = []
            for index, first in enumerate(firsts):
                results, updated = self.call(updated, [first, *rests[index % len(rests)]])
                every += results
            return every, updated

        jitted = jax.jit(run, donate_argnums=0)
        firsts, rests = [arrays[0] for arrays in sets], [arrays[1:] for arrays in self.inputs[:calls]]

        def start() -> list[Any]:
            results, self.updated = jitted(self.updated, firsts, rests)
            return [*results, *self.updated]

        return start


def without_work(case: Case) -> Callable[[], Any]:
    """A function that starts a program of the same arrays, donated alike, which computes one number."""
    jitted = jax.jit(lambda updated, arrays: (arrays[0].ravel()[:1] + 1, updated), donate_argnums=0)

    def start() -> Any:
        result, case.updated = jitted(case.updated, case.inputs[0])
        return [result, *case.updated]

    return start


def queued(start: Callable[[], Any], us: float) -> Callable[[], float]:
    """A function that measures the microseconds of GPU time of a program, which is expected to take some `us`."""
    programs = min(MOST_PROGRAMS, max(2, round(PROGRAMS_US / us)))
    busy = _busy()

    def elapsed(count: int) -> float:
        """Microseconds of work queued before and so many programs."""
        results = jax.block_until_ready(start())
        begun = time.perf_counter()
        busy()
        for _ in range(count):
            results = start()
        jax.block_until_ready(results)
        return (time.perf_counter() - begun) * 1e6

    elapsed(2)
    return lambda: (elapsed(1 + programs) - elapsed(1)) / programs


def gpu_times(case: Case, us: float) -> tuple[Timing, Timing]:
    """Microseconds of GPU time a call, which is expected to take some `us`: by PyTorch and by JAX, in turns."""
    by_torch = replays(case.benchmark.ours, len(case.inputs))
    calls = min(MOST_CALLS, max(1, len(case.inputs), round(PROGRAM_US / us)))
    by_jax = queued(case.program(calls), calls * us)
    each = [(by_torch(), by_jax() / calls) for _ in range(ROUNDS)]
    torch_us, jax_us = map(Timing.of, zip(*each, strict=True))
    return torch_us, jax_us


def waited(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int = 15) -> tuple[float, float]:
    """Microseconds until a call returns and until its results are there, with nothing queued before it: medians."""
    returned, ready = [], []
    for _ in range(repeats + 3):
        begun = time.perf_counter()
        results = call()
        returned.append((time.perf_counter() - begun) * 1e6)
        wait(results)
        ready.append((time.perf_counter() - begun) * 1e6)
    return round(statistics.median(returned[3:]), 1), round(statistics.median(ready[3:]), 1)


def same_bits(benchmark: Benchmark, by_torch: Any, by_jax: Sequence[jax.Array]) -> bool:
    """Whether a call's results have the same bits by both frameworks, where the op writes them."""
    ours = list(by_torch) if isinstance(by_torch, tuple | list) else [by_torch]
    theirs = [interop.to_torch(array) for array in by_jax]
    if benchmark.written is not None:
        ours[0], theirs[0] = benchmark.written(ours[0]), benchmark.written(theirs[0])
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(ours, theirs, strict=True)
    )


def beside_torch(benchmark: Benchmark, us: float) -> dict[str, Any]:
    """What a case's line has of the two frameworks: GPU time in turns, the host's part of a call, bits."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    case = Case(benchmark)
    one = case.program(1)
    by_jax = jax.block_until_ready(one())
    by_torch = case.benchmark.ours(0)
    torch.cuda.synchronize()
    equal = same_bits(benchmark, by_torch, by_jax)
    del by_torch, by_jax
    eager = waited(partial(case.benchmark.ours, 0), lambda _: torch.cuda.synchronize())
    jitted = waited(one, jax.block_until_ready)
    without = waited(without_work(case), jax.block_until_ready)
    torch_us, jax_us = gpu_times(case, us)
    return {
        "torch": {"us": torch_us.rounded(), "host_us": eager[0], "waited_us": eager[1]},
        "jax": {
            "us": jax_us.rounded(),
            "host_us": jitted[0],
            "waited_us": jitted[1],
            "without_work_us": without[1],
            "same_bits": equal,
        },
    }
