"""`xmla verify`: every op's cases against its definition, in both front-ends, and bit for bit between them."""

from collections.abc import Iterable, Mapping
from itertools import combinations

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from xmla.cli import calls
from xmla.cli._environment import HAS_GPU
from xmla.core.errors import ArgumentError
from xmla.core.layout import V41_FP4
from xmla.core.op import Case, Op, registry
from xmla.core.ops.compress_kv.reference import stored_values

# Largest error over largest value: two roundings to 8 bits, or float32 with the tensor cores' own fp8 sums.
TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-3}


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


def compare(op: Op, case: Case, front_ends: Mapping[str, calls.Call]) -> tuple[float, bool, bool]:
    """The worst error against the definition, whether all are within bounds, whether front-ends agree bit for bit."""
    found = [call(op, case.make(np.random.default_rng(0)), case.attrs) for call in front_ends.values()]
    wanted = calls.by_reference(op, case.make(np.random.default_rng(0)), case.attrs)
    error, right, identical = 0.0, True, True
    for name, want in wanted.items():
        # NaN in the definition of paged logits marks columns that are never written.
        where = ~np.isnan(want) if op.name == "indexer_logits_paged" else np.ones(want.shape, bool)
        for one, other in combinations(found, 2):
            identical &= np.array_equal(one[name][where].view(np.uint8), other[name][where].view(np.uint8))
        for results in found:
            got = results[name]
            if (op.name, name) == ("compress_kv", "cache"):
                (values, bound), (defined, _) = _entries(case, got), _entries(case, want)
                worst = largest_error(values, defined)
            else:
                bound = TOLERANCE.get(got.dtype.name, 0.0)
                worst = largest_error(got[where], want[where])
            error = max(error, worst)
            right &= worst <= bound
    return error, right, identical


def run(names: Iterable[str] | None = None) -> bool:
    """Print a table; True if everything agrees.

    Raises:
        ArgumentError: There is no op of a name.
        UnsupportedError: No front-end is installed.
    """
    ops = registry()
    if unknown := set(names or ()) - set(ops):
        raise ArgumentError(f"verify: op is {min(unknown)!r}, expected one of {', '.join(ops)}")
    console = Console()
    front_ends = calls.installed("verify", console)
    cases = [(op, case) for op in ops.values() for case in op.cases if not names or op.name in names]
    kernels = "compiled" if HAS_GPU else "interpreted"
    table = Table("op", "case", "error", "definition", title=f"xmla verify, {' and '.join(front_ends)}, {kernels}")
    both = len(front_ends) > 1
    if both:
        table.add_column("torch = JAX")
    passed = True
    for op, case in track(cases, "verifying", transient=True):
        error, right, identical = compare(op, case, front_ends)
        passed &= right and identical
        row = [op.name, case.name, f"{error:.1e}", "agrees" if right else "[red]DIFFERS"]
        table.add_row(*row, *(["identical" if identical else "[red]DIFFERS"] if both else []))
    console.print(table)
    return passed
