"""`xmla replay`: one call from a file that a failed check wrote, on this machine."""

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xmla.core.debug.checks import find_violation
from xmla.core.debug.reproducer import load
from xmla.core.debug.shadow import drifts
from xmla.machine import calls


def run(file: Path, as_json: bool = False) -> bool:
    """Print what the call was, whether its values are within limits and how far its results are; True if all is well.

    Each installed front-end repeats the call.

    Raises:
        ArgumentError: The file is no reproducer, or the call is none of its op.
        UnsupportedError: No front-end is installed.
    """
    console = Console(width=150, stderr=as_json)
    front_ends = calls.installed("replay", console)
    call = load(file)
    op = call.op
    arrays = {name: f"{array.dtype.name}{list(array.shape)}" for name, array in call.arrays.items()}
    others = {**call.attrs, "device": call.device, **call.versions}
    if not as_json:
        console.print(f"{call.by}: {call.failure}", soft_wrap=True, markup=False)
        table = Table(op.name, "")
        for name, value in {**arrays, **others}.items():
            table.add_row(escape(name), escape(str(value)))
        console.print(table)
    violation = find_violation(op, call.arrays, op.attributes(**call.attrs))
    well = violation is None or call.by != "XMLA_CHECK"  # the kernels take any values
    if violation is not None:
        console.print(f"values: {violation.message}", style="red")
    distances = []
    for framework, repeat in front_ends.items():
        for drift in drifts(op, call.arrays, call.attrs, repeat(op, call.arrays, call.attrs)):
            line = f"{framework}, {drift.result}: {drift.kind} {drift.value:.3g}, at most {drift.bound:g}"
            console.print(line, style=None if drift.ok else "red")
            well &= drift.ok
            finite = drift.value if isfinite(drift.value) else None  # JSON has no infinity
            distances.append({"framework": framework, **asdict(drift), "value": finite, "ok": drift.ok})
    if as_json:
        facts = {"op": op.name, "by": call.by, "failure": call.failure, "arrays": arrays}
        values = None if violation is None else violation.message
        facts |= {"others": {name: str(value) for name, value in others.items()}, "values": values}
        print(json.dumps(facts | {"results": distances, "ok": well}))
        return well
    verdict = "FAILS here: the lines in red" if not well else "does not fail here: its results are within limits"
    console.print(f"the call {verdict}", style=None if well else "red")
    return well
