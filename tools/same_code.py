"""Which kernels have other instructions than at another commit: a move leaves none.

python -m tools.same_code COMMIT [ARCH ...]        (by default 90 100 120; minutes each)

Other names, and other parameters of functions, leave none either. Code that becomes a function of its own may: LLVM and
ptxas order instructions otherwise where debug information has one call more.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tools.support_matrix import ROOT, SCRIPT, Line, lines_of

Key = tuple[str, str, str, int]


def instructions(lines: list[Line]) -> dict[Key, tuple[str, str]]:
    """Kernel and hash of each launch, by op, format, case and place in the plan."""
    found: dict[Key, tuple[str, str]] = {}
    for line in lines:
        if "refused" not in line:
            place = 0
            while (key := (line["op"], line["form"], line["case"], place)) in found:
                place += 1
            found[key] = line["kernel"], line["sass"]
    return found


def of_commit(commit: str, arch: str) -> dict[Key, tuple[str, str]]:
    """The launches as the tree of `commit` plans and compiles them."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            (script,) = tree.glob(f"t*/**/{SCRIPT.name}")  # in tests/core, at older commits
            return instructions(lines_of(script, arch, "--hash", root=tree))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main(
    commit: str, architectures: Annotated[list[str] | None, typer.Argument(help="90, 100, 120 by default.")] = None
) -> None:
    """Compare the machine code of every kernel with that of a commit. Exit 1 if some differs."""
    changed = 0
    for arch in architectures or ("90", "100", "120"):
        before, after = of_commit(commit, arch), instructions(lines_of(SCRIPT, arch, "--hash"))
        different = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        changed += len(different)
        print(f"sm_{arch}: {len(after)} launches, {len(different)} differ")
        for key in different:
            print(f"  {key}: {before.get(key, ('none',))[0]} → {after.get(key, ('none',))[0]}")
    sys.exit(changed > 0)


if __name__ == "__main__":
    typer.run(main)
