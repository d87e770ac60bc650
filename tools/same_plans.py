"""Which calls are planned otherwise than at another commit: a move leaves none.

python -m tools.same_plans [COMMIT]        (without one it prints every plan; seconds)

Every op's cases are planned for every known device and by every implementation; a refusal counts by its text.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.op import plan_call
from xmla.core.registry import registry
from xmla.core.values import KNOWN_DEVICES, Spec

ROOT = Path(__file__).parent.parent


def plans() -> Iterator[tuple[str, str]]:
    """What is planned, and the plan or why there is none."""
    for op in registry().values():
        for case in op.cases:
            arrays = case.make(np.random.default_rng(0))
            specs = {name: Spec.of_numpy(array) for name, array in arrays.items()}
            specs = {name: Spec(spec.shape, spec.dtype, spec.strides) for name, spec in specs.items()}
            tensors, attrs = tuple(specs.get(name) for name in op.tensors), op.attributes(**case.attrs)
            for device in KNOWN_DEVICES:
                for implementation in (None, *op.choices):
                    call = f"{op.name} {case.name} {device.name} {implementation}"
                    try:
                        yield call, str(plan_call(op, tensors, attrs, device, implementation)[0])
                    except (ArgumentError, UnsupportedError) as error:
                        yield call, f"{type(error).__name__}: {error}"


def of_commit(commit: str) -> str:
    """What this script prints in the tree of `commit`."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            script = tree / Path(__file__).relative_to(ROOT)
            environment = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(
                [sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    return done.stdout


def main(commit: Annotated[str | None, typer.Argument()] = None) -> None:
    """Print every plan, or those that are others than a commit's. Exit 1 if there are such."""
    lines = [f"{call}: {plan!r}" for call, plan in plans()]
    if commit is None:
        print("\n".join(lines))
        return
    others = of_commit(commit).splitlines()
    different = sorted({*lines} ^ {*others})
    print(f"{len(lines)} plans, {len(different)} lines differ")
    print("\n".join(different))
    sys.exit(bool(different))


if __name__ == "__main__":
    typer.run(main)
