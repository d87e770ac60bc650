"""`xmla verify`: every op's cases against its reference, in both front-ends, and bit for bit between them."""

import json
from collections.abc import Iterable, Mapping
from itertools import combinations

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.models.base import Model
from xmla.core.op import Case, Op
from xmla.core.registry import find_op, registry
from xmla.core.support import kinds_of
from xmla.core.values import difference
from xmla.machine import calls
from xmla.machine.environment import HAS_GPU


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest error over the largest value; infinite where infinities or NaN stand in other places."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    return float(np.abs(a[finite] - b[finite]).max(initial=0) / max(np.abs(b[finite]).max(initial=0), 1e-30))


def compare(
    op: Op, case: Case, front_ends: Mapping[str, calls.Call], implementation: str | None = None
) -> tuple[float, bool, bool]:
    """The worst error against the reference, whether all agree with it, whether front-ends agree bit for bit.

    Raises:
        UnsupportedError: The implementation does not serve the case.
    """
    inputs = case.make(np.random.default_rng(0))
    attrs = case.attrs if implementation is None else {**case.attrs, "implementation": implementation}
    answers = [call(op, case.make(np.random.default_rng(0)), attrs) for call in front_ends.values()]
    reference = calls.by_reference(op, case.make(np.random.default_rng(0)), case.attrs)
    error, right, identical = 0.0, True, True
    for name, want in reference.items():
        result, updated = op.outputs.get(name), op.updates.get(name)
        agreement = None if result is None else result.agreement
        where = None if result is None else result.written(want)
        values = [results[name] if where is None else results[name][where] for results in answers]
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


def chosen(
    names: Iterable[str] | None, every: bool, implementation: str | None = None, config: Model | None = None
) -> dict[str, tuple[Op, tuple[Case, ...]]]:
    """The cases to run by op: every one of the ops that are named, or of all with `every`, else one for each format.

    With an implementation those of ops that have it alone; with a model those of ops that its steps call, over caches
    of its formats.

    Raises:
        ArgumentError: There is no op, or no implementation, of a name.
    """
    ops = {name: find_op(name, "verify") for name in names} if names else registry()
    if implementation is not None:
        known = sorted({choice for op in ops.values() for choice in op.choices})
        if implementation not in known:
            message = f"verify: implementation is {implementation!r}, expected one of {', '.join(known)}"
            raise ArgumentError(message)
        ops = {name: op for name, op in ops.items() if implementation in op.choices}
    cases = {name: op.cases if names or every else of_formats(op) for name, op in ops.items()}
    if config is not None:
        formats = formats_of(config)
        cases = {
            name: tuple(case for case in cases[name] if formats_of_case(op, case) in formats[name])
            for name, op in ops.items()
            if name in formats
        }
    return {name: (ops[name], some) for name, some in cases.items()}


def formats_of(config: Model) -> dict[str, set[tuple[str, ...]]]:
    """What the pools of each op are that a model's steps call: the formats of caches, dtypes of others."""
    formats: dict[str, set[tuple[str, ...]]] = {}
    for call in (call for _, step in config.steps() for call in step):
        op = registry()[call.op]
        layouts = op.bind(call.specs, op.attributes(**call.attrs)).formats
        named = {name: getattr(layout, "format", layout.name) for name, layout in layouts.items()}
        pools = tuple(named.get(name, call.specs[name].dtype) for name in op.pools if name in call.specs)
        formats.setdefault(call.op, set()).add(pools)
    return formats


def formats_of_case(op: Op, case: Case) -> tuple[str, ...]:
    kinds = kinds_of(op.name, op.cases.index(case))
    return tuple(kinds[name][0] for name in op.pools if name in kinds)


def of_formats(op: Op) -> tuple[Case, ...]:
    """The first case with each of the formats that the op's caches have together."""
    cases: dict[tuple[str, ...], Case] = {}
    for case in op.cases:
        cases.setdefault(formats_of_case(op, case), case)
    return tuple(cases.values())


def run(
    names: Iterable[str] | None = None, every: bool = False, implementation: str | None = None,
    config: Model | None = None, as_json: bool = False,
) -> bool:  # fmt: skip
    """Print a table and a verdict, or both as JSON, and on the way each op on stderr; True if everything agrees.

    Raises:
        ArgumentError: There is no op, or no implementation, of a name.
        UnsupportedError: No front-end is installed.
    """
    ops = chosen(names, every, implementation, config)
    stderr = Console(stderr=True)
    console = stderr if as_json else Console()
    front_ends = calls.installed("verify", console)
    kernels = "compiled" if HAS_GPU else "interpreted"
    rows: list[dict[str, str | float | bool | None]] = []
    count, wrong, refused = sum(len(cases) for _, cases in ops.values()), 0, 0
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("", total=count)
        for name, (op, cases) in ops.items():
            bar.update(task, description=name)
            if not stderr.is_terminal:
                stderr.print(f"{name}: {len(cases)} of {len(op.cases)} cases", highlight=False)
            for case in cases:
                bar.advance(task)
                try:
                    error, right, identical = compare(op, case, front_ends, implementation)
                except UnsupportedError:
                    if implementation is None:
                        raise
                    refused += 1
                    continue
                wrong += not (right and identical)
                finite = error if np.isfinite(error) else None  # JSON has no infinity
                row = {"op": name, "case": case.name, "error": finite, "agrees": right}
                rows.append(row | ({"identical": identical} if len(front_ends) > 1 else {}))
    if not as_json:
        console.print(_table(f"xmla verify, {' and '.join(front_ends)}, {kernels}", rows, len(front_ends) > 1))
    formats = {} if config is None else formats_of(config)
    left_out = [
        f"{name} over {' and '.join(kind)}, of which there is no case"
        for name, kinds in formats.items()
        if name in ops
        for kind in kinds - {formats_of_case(ops[name][0], case) for case in ops[name][1]}
    ]
    for each in left_out if not as_json else ():
        console.print(f"left out: {each}", soft_wrap=True)
    every_case = [(op, case) for op, _ in ops.values() for case in op.cases]
    whole = sum(config is None or formats_of_case(op, case) in formats[op.name] for op, case in every_case)
    rest = "" if count == whole else f"; of {whole} cases --all runs the other {whole - count} too"
    count -= refused
    if refused:
        rest = f"; {implementation} does not serve {refused}{rest}"
    verdict = f"all {count} cases agree{rest}" if not wrong else f"{wrong} of {count} cases DIFFER{rest}"
    good = count > 0 and not wrong
    if as_json:
        facts = {"frameworks": [*front_ends], "kernels": kernels, "cases": rows, "left_out": left_out}
        print(json.dumps(facts | {"ok": good, "verdict": verdict}))
        return good
    console.print(verdict, style="green" if good else "red", highlight=False, soft_wrap=True)
    return good


def _table(title: str, rows: Iterable[Mapping[str, str | float | bool | None]], both: bool) -> Table:
    """The cases, and with `both` front-ends whether these agree."""
    table = Table(title=title)
    for name in ("op", "case", "error", "reference", *(["torch = JAX"] if both else [])):
        table.add_column(name, overflow="fold")
    for row in rows:
        error = "inf" if row["error"] is None else f"{row['error']:.1e}"
        cells = [str(row["op"]), str(row["case"]), error, "agrees" if row["agrees"] else "[red]DIFFERS"]
        table.add_row(*cells, *(["identical" if row["identical"] else "[red]DIFFERS"] if both else []))
    return table
