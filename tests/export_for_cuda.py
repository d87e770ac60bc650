"""Exports a call of every op for one architecture, on a machine without a GPU.

    JAX_PLATFORMS=cpu python tests/export_for_cuda.py 90 FOLDER
Writes FOLDER/<op>.export, of the case that `exported_case` tells.
"""

import sys
from pathlib import Path

import jax
import numpy as np

from xmla import jax_api
from xmla.core.device import KNOWN_DEVICES, assume_device
from xmla.core.op import Case, Op, registry


def exported_case(op: Op) -> tuple[Case, dict[str, np.ndarray]]:
    case = op.cases[min(1, len(op.cases) - 1)]
    inputs = case.make(np.random.default_rng(0))
    return case, {name: np.ascontiguousarray(inputs[name]) for name in op.tensors if name in inputs}


def call(op: Op, case: Case, names: list[str], *given: jax.Array) -> object:
    by_name = dict(zip(names, given, strict=True))
    return getattr(jax_api, op.name)(*[by_name.get(name) for name in op.tensors], **case.attrs)


def main() -> None:
    device = next(d for d in KNOWN_DEVICES if d.arch == int(sys.argv[1]))
    for op in registry().values():
        case, inputs = exported_case(op)
        function = jax.jit(lambda *given, op=op, case=case, names=[*inputs]: call(op, case, names, *given))
        with assume_device(device):
            shapes = [jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)) for a in inputs.values()]
            exported = jax.export.export(function, platforms=["cuda"], disabled_checks=jax_api.EXPORT_CHECKS)(*shapes)
        Path(sys.argv[2], f"{op.name}.export").write_bytes(exported.serialize())


if __name__ == "__main__":
    main()
