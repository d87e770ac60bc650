"""`xmla replay`: one call from a file that a failed check wrote, on this machine."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xmla.core.debug.checks import find_violation
from xmla.core.debug.reproducer import load
from xmla.core.debug.shadow import drifts
from xmla.machine import calls


def run(file: Path) -> bool:
    """Print what the call was, whether its values are within limits and how far its results are; True if all is well.

    Each installed front-end repeats the call.

    Raises:
        ArgumentError: The file is no reproducer, or the call is none of its op.
        UnsupportedError: No front-end is installed.
    """
    console = Console(width=150)
    front_ends = calls.installed("replay", console)
    call = load(file)
    op = call.op
    console.print(f"{call.by}: {call.failure}", soft_wrap=True, markup=False)
    table = Table(op.name, "")
    for name, array in call.arrays.items():
        table.add_row(name, f"{array.dtype.name}{list(array.shape)}")
    for name, value in (*call.attrs.items(), ("device", call.device), *call.versions.items()):
        table.add_row(escape(name), escape(str(value)))
    console.print(table)
    violation = find_violation(op, call.arrays, op.attributes(**call.attrs))
    well = violation is None or call.by != "XMLA_CHECK"  # the kernels take any values
    if violation is not None:
        console.print(f"values: {violation.message}", style="red")
    for framework, repeat in front_ends.items():
        for drift in drifts(op, call.arrays, call.attrs, repeat(op, call.arrays, call.attrs)):
            line = f"{framework}, {drift.result}: {drift.kind} {drift.value:.3g}, at most {drift.bound:g}"
            console.print(line, style=None if drift.ok else "red")
            well &= drift.ok
    verdict = "FAILS here: the lines in red" if not well else "does not fail here: its results are within limits"
    console.print(f"the call {verdict}", style=None if well else "red")
    return well
