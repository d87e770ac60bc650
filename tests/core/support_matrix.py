"""docs/support.md: op × format × architecture, read from the compiled kernels.

python tests/core/support_matrix.py       (some minutes: every plan for every architecture)
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "docs" / "support.md"
SCRIPT = Path(__file__).with_name("compile_plans.py")
ARCHITECTURES = (90, 100, 103, 120, 121, 89, 80)
SHORT = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma.sync"}
Line = Mapping[str, Any]

HEAD = """# Support

Made by `python tests/core/support_matrix.py` and held against the compiled kernels, cell by cell, by
[test_compile.py](../tests/core/test_compile.py). Every plan of the ops' cases and of serving sizes is compiled for each
architecture: it fits the part's shared and tensor memory, and a cell shows the tensor-core instructions found in it
(`yes`: it needs none). `spills` is the local memory of a thread, in bytes, of the worst kernel that stores registers
there (STL in its SASS; a stack that no instruction touches does not count). On sm_90 tiles are measured, and a few
words are the price of more programs an SM; sm_80 has no tiles of its own, and Triton 3.9 spills there; on sm_120 and
sm_121 MXFP4 keys in bounded memory spill eight words with it. `no` is what `xmla supports` answers too. Formats are the
dtype and the last axis of the caches.

sm_90 also runs, on an H200; the others are compiled only. sm_89 and sm_80 are extras without tiles of their own; sm_80
converts neither from nor to e4m3, so that only ops over 16-bit rows, logits and integers are there.
"""


def compile_all(arch: int, triton: Path | None = None) -> list[Line]:
    """What `compile_plans.py` tells of an architecture, with the Triton in a folder or the environment's own."""
    return lines_of(SCRIPT, str(arch), triton=triton)


def lines_of(script: Path, *arguments: str, triton: Path | None = None, root: Path = ROOT) -> list[Line]:
    """The JSON lines of a script that compiles the tree at `root`, in a process that does not interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    first = [str(triton)] if triton else []
    environment["PYTHONPATH"] = os.pathsep.join([*first, str(root), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def cells(lines: Iterable[Line]) -> dict[tuple[str, str], str]:
    """An architecture's column: what to say of each op and format."""
    rows: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        rows.setdefault((line["op"], line["form"]), []).append(line)
    return {key: _cell(found) for key, found in rows.items()}


def _cell(lines: list[Line]) -> str:
    if any("refused" in line for line in lines):
        return "no"
    used = {SHORT[name] for line in lines for name in line["mma"]}
    spilled = max(line["spilled_bytes"] or 0 for line in lines)
    return (", ".join(sorted(used, reverse=True)) or "yes") + (f"; spills {spilled} B" if spilled else "")


def table(columns: Mapping[int, Mapping[tuple[str, str], str]]) -> str:
    """The columns side by side; what is nowhere is left out."""
    lines = [f"| op | format | {' | '.join(f'sm_{arch}' for arch in columns)} |", "|---" * (2 + len(columns)) + "|"]
    for key in sorted({key for column in columns.values() for key in column}):
        shown = [column.get(key, "no") for column in columns.values()]
        if set(shown) != {"no"}:
            lines.append(f"| `{key[0]}` | {key[1]} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def committed() -> dict[int, dict[tuple[str, str], str]]:
    """The columns of the table in docs/support.md."""
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    keys = [(row[0].strip("`"), row[1]) for row in rows]
    return {
        int(name.removeprefix("sm_")): dict(zip(keys, [row[2 + i] for row in rows], strict=True))
        for i, name in enumerate(head[2:])
    }


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(f"{HEAD}\n{table({arch: cells(compile_all(arch)) for arch in ARCHITECTURES})}")
