"""Exports a call of every op for one architecture, on a machine without a GPU.

    JAX_PLATFORMS=cpu python -m tools.export_for_cuda 90 FOLDER
Writes FOLDER/<op>.export, of the case that `exported_case` tells.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from xmla import jax_api
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.core.values import KNOWN_DEVICES, Device, assume_device
from xmla.jax_api._all_ops import JAX_OPS


def exported_case(op: Op) -> tuple[Case, dict[str, np.ndarray]]:
    case = op.cases[min(1, len(op.cases) - 1)]
    inputs = case.make(np.random.default_rng(0))
    return case, {name: np.ascontiguousarray(inputs[name]) for name in op.tensors if name in inputs}


def function_of(op: Op, case: Case, names: Sequence[str], implementation: str | None = None) -> Callable[..., object]:
    """The case's call as a function of the arrays `names`."""

    def call(*given: jax.Array) -> object:
        by_name = dict(zip(names, given, strict=True))
        arguments = [by_name.get(name) for name in op.tensors]
        return getattr(JAX_OPS, op.name)(*arguments, **case.attrs, implementation=implementation)

    return call


def export(
    op: Op, case: Case, inputs: Mapping[str, np.ndarray], device: Device, implementation: str | None = None
) -> jax.export.Exported:
    """The case's call on arrays like `inputs`, for a device that need not be there."""
    # JAX has no 64-bit integers by default.
    shapes = [jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)) for a in inputs.values()]
    function = jax.jit(function_of(op, case, [*inputs], implementation))
    with assume_device(device):
        return jax.export.export(function, platforms=["cuda"], disabled_checks=jax_api.EXPORT_CHECKS)(*shapes)


def main() -> None:
    device = next(d for d in KNOWN_DEVICES if d.arch == int(sys.argv[1]))
    for op in registry().values():
        exported = export(op, *exported_case(op), device)
        Path(sys.argv[2], f"{op.name}.export").write_bytes(exported.serialize())


if __name__ == "__main__":
    main()
