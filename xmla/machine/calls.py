"""One call of an op through each front-end, on this machine: NumPy arrays in, NumPy arrays out."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.console import Console

from xmla._frameworks import missing, needed
from xmla.core.errors import UnsupportedError
from xmla.core.op import Op

Arrays = dict[str, np.ndarray]
Call = Callable[[Op, Mapping[str, np.ndarray], Mapping[str, Any]], Arrays]


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else () if results is None else (results,)


def by_torch(op: Op, arrays: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> Arrays:
    """The results, and copies of the arrays that the call updates, by name; tensors have the arrays' strides."""
    import torch

    from xmla.torch_api._all_ops import TORCH_OPS
    from xmla.torch_api._arrays import from_strided, to_numpy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors: dict[str, Any] = {
        name: from_strided(arrays[name], device) if name in arrays else None for name in op.tensors
    }
    results = as_tuple(getattr(TORCH_OPS, op.name)(*tensors.values(), **attrs))
    named = dict(zip(op.outputs, results, strict=True)) | {name: tensors[name] for name in op.mutates}
    return {name: to_numpy(value.cpu()) for name, value in named.items()}


def by_jax(op: Op, arrays: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> Arrays:
    """Results and updated arrays of a call by JAX, whose arrays are dense, under `jax.jit`."""
    import jax
    import jax.numpy as jnp

    from xmla.jax_api._all_ops import JAX_OPS

    operands = [jnp.asarray(arrays[name]) if name in arrays else None for name in op.tensors]
    results = as_tuple(jax.jit(lambda *inputs: getattr(JAX_OPS, op.name)(*inputs, **attrs))(*operands))
    return {name: np.asarray(value) for name, value in zip([*op.outputs, *op.mutates], results, strict=True)}


def by_reference(op: Op, arrays: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> Arrays:
    """Results and updated arrays of a call by the reference, on copies of the arrays."""
    inputs = {name: array.copy() if name in op.mutates else array for name, array in arrays.items()}
    with np.errstate(all="ignore"):
        results = as_tuple(op.reference(**inputs, **op.attributes(**attrs)._asdict()))
    named = dict(zip(op.outputs, results, strict=True)) | {name: inputs[name] for name in op.mutates}
    return {name: np.asarray(value) for name, value in named.items()}


FRONT_ENDS: Mapping[str, Call] = {"torch": by_torch, "jax": by_jax}


def installed(command: str, console: Console) -> dict[str, Call]:
    """The front-ends that can be called here; a line tells which one is left out, and the extra that brings it.

    Raises:
        UnsupportedError: There is none; the message names the extras.
    """
    present = {name: call for name, call in FRONT_ENDS.items() if not missing(name)}
    if not present:
        raise UnsupportedError(f"{command}: {'; '.join(needed(name) for name in FRONT_ENDS)}")
    for name in FRONT_ENDS.keys() - present.keys():
        console.print(f"left out: {name}, since {needed(name)}", markup=False, soft_wrap=True)
    return present
