"""`xmla verify`: every op's cases against its definition, in both front-ends, and bit for bit between them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from xmla import jax_api, torch_api
from xmla.core.layout import V41_FP4
from xmla.core.op import Case, Op, registry
from xmla.core.ops.compress_kv.reference import stored_values
from xmla.torch_api._arrays import to_numpy

# Largest error over largest value: two roundings to 8 bits, or float32 with the tensor cores' own fp8 sums.
TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-3}


def _by_torch(op: Op, case: Case, device: str) -> list[np.ndarray]:
    inputs = case.make(np.random.default_rng(0))
    arguments = [_tensor(inputs[name], device) if name in inputs else None for name in op.tensors]
    results = getattr(torch_api, op.name)(*arguments, **case.attrs)
    results = results if isinstance(results, tuple) else () if results is None else (results,)
    by_name: dict[str, Any] = dict(zip(op.tensors, arguments, strict=True))
    return [to_numpy(value.cpu()) for value in (*results, *(by_name[name] for name in op.mutates))]


def _tensor(array: np.ndarray, device: str) -> torch.Tensor:
    dense = np.ascontiguousarray(array)
    raw = torch.from_numpy(dense.view(np.uint8).reshape(-1).copy())
    return raw.view(getattr(torch, array.dtype.name)).view(array.shape).to(device)


def _by_jax(op: Op, case: Case) -> list[np.ndarray]:
    inputs = case.make(np.random.default_rng(0))
    arguments = [jnp.asarray(inputs[name]) if name in inputs else None for name in op.tensors]
    results = jax.jit(lambda *a: getattr(jax_api, op.name)(*a, **case.attrs))(*arguments)
    return [np.asarray(value) for value in (results if isinstance(results, tuple) else (results,))]


def _by_definition(op: Op, case: Case) -> list[np.ndarray]:
    inputs = case.make(np.random.default_rng(0))
    attrs = op.defaults | dict(case.attrs)
    results = op.reference(**inputs, **attrs)
    results = results if isinstance(results, tuple) else () if results is None else (results,)
    return [np.asarray(value) for value in (*results, *(inputs[name] for name in op.mutates))]


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest error over the largest value; infinite where infinities or NaN stand in other places."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    return float(np.abs(a[finite] - b[finite]).max(initial=0) / max(np.abs(b[finite]).max(initial=0), 1e-30))


def _entries(case: Case, cache: np.ndarray) -> tuple[np.ndarray, float]:
    """What entries of `compress_kv` stand for, and a step of their format at its largest value, as a part of that."""
    dim = len(case.make(np.random.default_rng(0))["norm_weight"])
    values = stored_values(cache, dim, case.attrs.get("cache_format"))
    return values, 1 / 3 if cache.shape[2] in (V41_FP4.row, dim // 2 + 4) else 1 / 14


def compare(op: Op, case: Case, device: str) -> tuple[float, bool, bool]:
    """The worst error against the definition, whether it is within bounds, whether torch and JAX agree bit for bit."""
    ours, theirs, wanted = _by_torch(op, case, device), _by_jax(op, case), _by_definition(op, case)
    error, right, identical = 0.0, True, True
    for name, a, b, want in zip([*op.outputs, *op.mutates], ours, theirs, wanted, strict=True):
        # NaN in the definition of paged logits marks columns that are never written.
        where = ~np.isnan(want) if op.name == "indexer_logits_paged" else np.ones(want.shape, bool)
        identical &= np.array_equal(a[where].view(np.uint8), b[where].view(np.uint8))
        if (op.name, name) == ("compress_kv", "cache"):
            (got, bound), (values, _) = _entries(case, a), _entries(case, want)
            worst = largest_error(got, values)
        else:
            bound = TOLERANCE.get(a.dtype.name, 0.0)
            worst = largest_error(a[where], want[where])
        error = max(error, worst)
        right &= worst <= bound
    return error, right, identical


def run(names: Iterable[str] | None = None) -> bool:
    """Print a table; True if everything agrees."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ops = registry()
    unknown = set(names or ()) - set(ops)
    if unknown:
        raise SystemExit(f"no op {', '.join(sorted(unknown))}; there are {', '.join(ops)}")
    cases: list[tuple[Op, Case]] = [
        (op, case) for op in ops.values() for case in op.cases if not names or op.name in names
    ]
    table = Table("op", "case", "error", "definition", "torch = JAX", title=f"xmla verify on {device}")
    passed = True
    for op, case in track(cases, "verifying", transient=True):
        error, right, identical = compare(op, case, device)
        passed &= right and identical
        row: list[Any] = [op.name, case.name, f"{error:.1e}"]
        table.add_row(*row, "agrees" if right else "[red]DIFFERS", "identical" if identical else "[red]DIFFERS")
    Console().print(table)
    return passed
