"""`xmla verify`: every op's cases against its reference, in both front-ends, and bit for bit between them."""

from collections.abc import Iterable, Mapping
from itertools import combinations

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from xmla.core.errors import ArgumentError
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.core.tolerance import difference
from xmla.machine import calls
from xmla.machine.environment import HAS_GPU


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest error over the largest value; infinite where infinities or NaN stand in other places."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    return float(np.abs(a[finite] - b[finite]).max(initial=0) / max(np.abs(b[finite]).max(initial=0), 1e-30))


def compare(op: Op, case: Case, front_ends: Mapping[str, calls.Call]) -> tuple[float, bool, bool]:
    """The worst error against the reference, whether all agree with it, whether front-ends agree bit for bit."""
    inputs = case.make(np.random.default_rng(0))
    found = [call(op, case.make(np.random.default_rng(0)), case.attrs) for call in front_ends.values()]
    wanted = calls.by_reference(op, case.make(np.random.default_rng(0)), case.attrs)
    error, right, identical = 0.0, True, True
    for name, want in wanted.items():
        result, updated = op.outputs.get(name), op.updates.get(name)
        agreement = None if result is None else result.agreement
        where = None if result is None else result.written(want)
        values = [results[name] if where is None else results[name][where] for results in found]
        want = want if where is None else want[where]
        for one, other in combinations(values, 2):
            identical &= np.array_equal(one.view(np.uint8), other.view(np.uint8))
        if updated is not None:
            agreement = updated.agreement(want, inputs, case.attrs)
            want, *values = (updated.values(array, inputs, case.attrs) for array in (want, *values))
        for got in values:
            error = max(error, largest_error(got, want))
            right &= difference(got, want, agreement) is None
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
    table = Table("op", "case", "error", "reference", title=f"xmla verify, {' and '.join(front_ends)}, {kernels}")
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
