"""`xmla replay`: one call from a file that a failed check wrote, on this machine."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from xmla import torch_api
from xmla.cli._environment import HAS_GPU
from xmla.core.checks import find_violation
from xmla.core.errors import ArgumentError
from xmla.core.op import Op, registry
from xmla.core.reproducer import Reproducer, load
from xmla.core.shadow import drifts
from xmla.torch_api._arrays import to_numpy


def run(file: Path) -> bool:
    """Print what the call was, whether its values are within limits and how far its results are; True if all is well.

    Raises:
        ArgumentError: The file is no reproducer, or its op is not known.
    """
    call = load(file)
    ops = registry()
    if call.op not in ops:
        raise ArgumentError(f"replay: op is {call.op!r}, expected one of {', '.join(ops)}")
    op = ops[call.op]
    table = Table(call.op, "", title=f"{call.by}: {call.failure}")
    for name, array in call.arrays.items():
        table.add_row(name, f"{array.dtype.name}{list(array.shape)}")
    for name, value in (*call.attrs.items(), *call.versions.items()):
        table.add_row(name, str(value))
    console = Console(width=150)
    console.print(table)
    violation = find_violation(op, call.arrays, call.attrs)
    well = violation is None or call.by != "XMLA_CHECK"  # the kernels take any values
    if violation is not None:
        console.print(f"values: {violation.message}", style="red")
    for drift in drifts(op, call.arrays, call.attrs, compute(op, call)):
        shown = f"{drift.result}: {drift.kind} {drift.value:.3g}, at most {drift.bound:g}"
        console.print(shown, style=None if drift.ok else "red")
        well &= drift.ok
    return well


def compute(op: Op, call: Reproducer) -> dict[str, np.ndarray]:
    """What the kernels make of it: the results, and the arrays that the call updates."""
    device = "cuda" if HAS_GPU else "cpu"
    arguments: dict[str, Any] = dict.fromkeys(op.tensors)
    arguments |= {name: _tensor(array, device) for name, array in call.arrays.items()}
    found: Any = getattr(torch_api, op.name)(*arguments.values(), **call.attrs)
    results = found if isinstance(found, tuple) else () if found is None else (found,)
    named = dict(zip(op.outputs, results, strict=True)) | {name: arguments[name] for name in op.mutates}
    return {name: to_numpy(value.cpu()) for name, value in named.items()}


def _tensor(array: np.ndarray, device: str) -> torch.Tensor:
    """A tensor with the array's strides."""
    strides = [step // array.itemsize for step in array.strides]
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) if array.size else 0
    flat = np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,))
    raw = torch.from_numpy(flat.view(np.uint8)).to(device)
    return raw.view(getattr(torch, array.dtype.name)).as_strided(array.shape, strides)
