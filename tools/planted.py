"""Plants simple faults in files of the host's code, one at a time, and runs tests that have to notice (make planted).

python -m tools.planted [--only WORDS]

Faults are cosmic-ray's: a comparison that is another, a number plus or minus one, `and` for `or`, a loop that is not
run. Guards that are worth a thought of their own stand in tools/mutants.py. Some faults change nothing that a caller
sees, and survive: how many stands here, and more of them, or less, fail.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tools.mutants import ROOT, copy_tree

VERSION = "8.7.0"
TOOL = ROOT / "build" / "cosmic-ray" / VERSION / "bin"
SECONDS = 300  # of a test run that is taken for one without end
# Of operators a kind each: what else an addition could be is noticed by what notices a subtraction.
SUMS = "Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Mod_FloorDiv"
COMPARISONS = "Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|In_NotIn|NotIn_In"
LEFT_OUT = [
    f"core/ReplaceBinaryOperator_(?!({SUMS})$)",
    f"core/ReplaceComparisonOperator_(?!({COMPARISONS})$)",
    "core/(ReplaceUnary|AddNot|RemoveDecorator|ExceptionReplacer|Variable)",
]


@dataclass(frozen=True)
class Planted:
    """A file, what pytest runs of it, and how many of its faults survive."""

    file: str
    tests: str
    survive: int


FILES = (
    Planted("xmla/jax_api/_batching.py", "tests/test_jax_transforms.py -k vmap", 5),
    # cdiv's way for numbers is the shorter one alone: two faults send them the longer way.
    Planted("xmla/core/values/integers.py", "tests/core/test_template.py -k 'numbers or python_would'", 2),
)


def configuration(planted: Planted) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    return f"""
[cosmic-ray]
module-path = {json.dumps(planted.file)}
timeout = {SECONDS}.0
excluded-modules = []
test-command = {json.dumps(" ".join(command) + " " + planted.tests)}
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = {json.dumps(LEFT_OUT)}
"""


def survivors(planted: Planted) -> tuple[int, list[str]]:
    """How many faults were planted, and the changes that no test noticed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        (folder / "cosmic-ray.toml").write_text(configuration(planted))

        def ray(tool: str, *words: str) -> str:
            environment = os.environ | {"PYTHONPATH": name}
            return subprocess.run(
                [str(TOOL / tool), *words], cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        ray("cosmic-ray", "baseline", "cosmic-ray.toml")
        ray("cosmic-ray", "init", "cosmic-ray.toml", "faults.sqlite")
        ray("cr-filter-operators", "faults.sqlite", "cosmic-ray.toml")
        ray("cosmic-ray", "exec", "cosmic-ray.toml", "faults.sqlite")
        done = [result for _, result in map(json.loads, ray("cosmic-ray", "dump", "faults.sqlite").splitlines())]
    ran = [result for result in done if result["worker_outcome"] != "skipped"]
    return len(ran), [result["diff"] for result in ran if result["test_outcome"] == "survived"]


def main(only: Annotated[str, typer.Option(help="Files whose name contains this.")] = "") -> None:
    """Plant the faults of each file; print those that survive. Exit 1 if there are others than it says."""
    if not (TOOL / "cosmic-ray").exists():
        shutil.rmtree(TOOL.parent, ignore_errors=True)  # an environment of its own: it only starts the tests
        subprocess.run([sys.executable, "-m", "venv", str(TOOL.parent)], check=True)
        subprocess.run([str(TOOL / "python"), "-m", "pip", "install", "-q", f"cosmic-ray=={VERSION}"], check=True)
    console, others = Console(width=120, soft_wrap=True, markup=False, highlight=False), False
    for planted in FILES:
        if only in planted.file:
            count, diffs = survivors(planted)
            console.print(*diffs, sep="\n")
            console.print(f"{planted.file}: of {count} faults {len(diffs)} survive, expected {planted.survive}")
            others |= len(diffs) != planted.survive
    raise typer.Exit(code=int(others))


if __name__ == "__main__":
    typer.run(main)
