"""What a case of `xmla bench` states: a call that either front-end makes, its inputs, what it is compared with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from xmla.bench.errors import relative_error
from xmla.torch_api._all_ops import TORCH_OPS

L2_BYTES = 60 << 20

Arrays = Sequence[torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One case: a call on several sets of inputs, which together pass the L2 cache where a call's own do not.

    Attributes:
        call: The call by a front-end, `call(ops, *arrays)` with `ops` either `TORCH_OPS` or `JAX_OPS`. Returns its
            results, then the new values of the arrays at `updates`.
        inputs: The arrays of each set.
        updates: The places of the arrays that the call updates in place. They are the same in all sets.
        check: The error of `ours(0)` against something that shares no kernel with it.
        peers: Other calls on the same inputs, functions of a set's index.
        peer_checks: The errors of peers against the same.
        written: The part of the first result that the op writes, where it leaves the rest as it was.
        flops, bytes: Of a call, as the model counts.
        bound: The ceiling that `flops` or `bytes` are compared with: copy, bf16 or fp8.
        tolerance: The largest error of a right result, a peer's too.
        by_jax: JAX makes the call too, where it is asked for. Not where another case differs in values alone.
    """

    op: str
    case: str
    call: Callable[..., Any]
    inputs: Sequence[Arrays]
    check: Callable[[], float]
    updates: tuple[int, ...] = ()
    peers: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    peer_checks: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    written: Callable[[torch.Tensor], torch.Tensor] | None = None
    flops: float = 0.0
    bytes: float = 0.0
    bound: str = "copy"
    tolerance: float = 1e-2
    by_jax: bool = True

    def ours(self, index: int) -> Any:
        """The call by PyTorch, on one set of inputs."""
        return self.call(TORCH_OPS, *self.inputs[index])


def rotation(bytes_a_set: float) -> int:
    """Input sets that together pass twice the L2 cache."""
    return max(2, min(8, int(2 * L2_BYTES // max(bytes_a_set, 1)) + 1))


@dataclass(frozen=True)
class _WithImplementation:
    """A front-end whose ops are asked for by an implementation."""

    ops: Any
    implementation: str

    def __getattr__(self, op: str) -> Any:
        return partial(getattr(self.ops, op), implementation=self.implementation)


def with_implementation(benchmark: Benchmark, implementation: str) -> Benchmark:
    """A case by one implementation, timed beside what calls take by default and compared with its results."""

    def call(ops: Any, *arrays: Any) -> Any:
        return benchmark.call(_WithImplementation(ops, implementation), *arrays)

    def first(results: Any) -> torch.Tensor:
        result = results[0] if isinstance(results, tuple) else results
        return result if benchmark.written is None else benchmark.written(result)

    return replace(
        benchmark, case=f"{benchmark.case}, {implementation}", call=call, peer_checks={},
        check=lambda: relative_error(first(call(TORCH_OPS, *benchmark.inputs[0])), first(benchmark.ours(0))),
        peers={"the default": benchmark.ours},
    )  # fmt: skip
