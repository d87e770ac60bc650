"""What the tests share: inputs with their strides, guard regions, comparisons."""

from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.comparison import (  # noqa: F401, tests have them from here
    CANARY,
    as_numpy,
    assert_bits_equal,
    assert_close,
    assert_updated,
    guarded,
    must_differ,
    span,
)  # fmt: skip
from tools.environment import EVERYTHING
from xmla import interop
from xmla.core.formats.mla import MlaLayout
from xmla.core.op import Case, Op, plan_call
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.values import ATTENTION_OUT, Device, Spec, Tolerance
from xmla.demo import Model

if TYPE_CHECKING:  # seconds of an import, which programs of JAX alone do not need
    import torch

# Merged from parts, each of which was rounded too: 2**-9 (2 Σ p |v| + |out|), with few keys, so Σ p |v| up to 2.
MERGED_OUT = Tolerance(2**-7, ATTENTION_OUT.relative, ATTENTION_OUT.cosine)


def all_cases() -> list[tuple[Op, Case]]:
    return [(op, case) for op in registry().values() for case in op.cases]


# Of 43 s that it takes to interpret every case once these take 16: only compiled kernels are others at their sizes.
SLOW = {
    "compress_rows_backward": "150-ratio128-1x512-norm-rope64-float16",
    "sparse_mla_backward": "t3-h2-k1030-page64-plain",
}


def cases(op: Op) -> list[Case]:
    """The op's cases, without XMLA_ALL but for a slow one, whose values tests/test_ops.py compares in any run."""
    return [case for case in op.cases if EVERYTHING or SLOW.get(op.name) != case.name]


def case_id(value: object) -> str:
    return value.name if isinstance(value, Op | Case) else repr(value)


def make(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    return case.make(np.random.default_rng(seed))


def specs(case: Case) -> dict[str, Spec]:
    """What a case's inputs are. Collection asks 5,000 times for those of 340 cases, which take seconds to make."""
    return _specs(case.make)


@cache
def _specs(make: Callable[[np.random.Generator], dict[str, np.ndarray]]) -> dict[str, Spec]:
    return {name: Spec.of_numpy(array) for name, array in make(np.random.default_rng(0)).items()}


def size(case: Case) -> int:
    """The elements of all inputs."""
    return sum(prod(spec.shape) for spec in specs(case).values())


# pyproject.toml asks for a release that has it; an environment that others made may be older.
needs_glm = pytest.mark.skipif(bool(Model.GLM.too_old), reason=f"needs transformers {Model.GLM.since} or later")


def as_stored(keys: "torch.Tensor", device: str) -> "torch.Tensor":
    """Indexer keys [N, D] as the fp8 cache holds them, on the CPU in float32: a model selects from the same numbers."""
    import torch

    from xmla import torch_api

    slots = torch.arange(len(keys), dtype=torch.int32, device=device)
    cache = torch.zeros(1, max(len(keys), 1), keys.shape[1] + 4, dtype=torch.uint8, device=device)
    torch_api.write_indexer_cache(keys.to(device), slots, cache)
    values, scales = torch_api.read_indexer_cache(cache, slots)
    return (values.float() * scales[:, None]).cpu()


# Axes whose sizes follow from another's.
FOLLOWS = {"B": ("B+1", 1), "C·D": ("2·C·D", 2), "D": ("2·D", 2)}


def smallest(op: Op) -> Case:
    return min(op.cases, key=size)


def axes(op: Op, inputs: dict[str, np.ndarray]) -> list[str]:
    """The axes whose sizes are free."""
    following = {axis for axis, _ in FOLLOWS.values()}
    return sorted({label for name in inputs for label in op.tensors[name].names} - following)


def with_axis(op: Op, inputs: dict[str, np.ndarray], axis: str, size: int) -> dict[str, np.ndarray]:
    """The first `size` along an axis; what has no elements keeps no strides, as arrays from NumPy."""
    follows, factor = FOLLOWS.get(axis, ("", 1))
    sizes = {axis: size, follows: size + 1 if follows == "B+1" else size * factor}
    found = {}
    for name, array in inputs.items():
        cut = array[tuple(slice(sizes.get(label)) for label in op.tensors[name].names)]
        found[name] = np.ascontiguousarray(cut)
    return found


def attributes(op: Op, case: Case) -> dict[str, object]:
    return op.defaults | dict(case.attrs)


def copies(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Independent copies with the same strides and the same bytes between the elements."""
    return {name: guarded(array)[0] for name, array in inputs.items()}


def to_torch(array: np.ndarray, device: str) -> "torch.Tensor":
    """A tensor with the array's strides, sharing memory on the CPU."""
    import torch

    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=device)
    flat = np.lib.stride_tricks.as_strided(array, (span(array),), (array.itemsize,))
    raw = torch.from_numpy(flat.view({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[array.itemsize]))
    strides = [s // array.itemsize for s in array.strides]
    return raw.view(getattr(torch, array.dtype.name)).to(device).as_strided(array.shape, strides)


def torch_inputs(op: Op, inputs: dict[str, np.ndarray], device: str) -> "list[torch.Tensor | None]":
    return [to_torch(inputs[name], device) if name in inputs else None for name in op.tensors]


def jax_inputs(op: Op, inputs: dict[str, np.ndarray]) -> list[object]:
    return [jnp.asarray(np.ascontiguousarray(inputs[n])) if n in inputs else None for n in op.tensors]


def torch_to_jax(tensor: "torch.Tensor") -> jax.Array:
    """JAX's own copy: memory that came from NumPy starts where JAX may not share it."""
    return interop.to_jax(tensor.clone())


def as_tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def assert_entries_equal(name: str, layout: MlaLayout, got: object, want: object) -> None:
    """Pools of the same entries: NaN in the same dims, which NaN is the hardware's choice, and the bits of the rest.

    An entry with a NaN has other bits than its own: those of its scale. So its other dims are compared as values.
    """
    pools = [as_numpy(pool).copy() for pool in (got, want)]
    slots = np.arange(pools[1].shape[0] * pools[1].shape[1])
    with np.errstate(invalid="ignore"):
        ours, theirs = (layout.gather(pool, slots) for pool in pools)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all(), f"{name}: {int((~same).sum())} of {same.size} values differ"
    broken = slots[np.isnan(theirs).any(axis=1)]
    for pool in pools:
        layout.scatter(
            pool, broken, *(np.zeros((len(broken), dims), np.float32) for dims in (layout.latent, layout.rope))
        )
    assert_bits_equal(name, *pools)


def written(op: Op, reference: tuple[np.ndarray, ...]) -> np.ndarray | None:
    """Where an op that leaves elements of its result unwritten writes; None: it writes everything."""
    masks = [result.written(value) for result, value in zip(op.outputs.values(), reference, strict=True)]
    return next((mask for mask in masks if mask is not None), None)


def results(op: Op, reference: tuple[np.ndarray, ...]) -> Iterator[tuple[str, np.ndarray]]:
    yield from zip(op.outputs, reference, strict=True)


def plan_of(op: Op, case: Case, device: Device, implementation: str | None = None) -> Plan:
    """The plan of a case's call on a device, which need not be here."""
    given = tuple(specs(case).get(name) for name in op.tensors)
    return plan_call(op, given, op.attributes(**case.attrs), device, implementation)[0]
