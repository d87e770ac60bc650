"""Python and the `xmla` command as a user starts them: in a clean environment, and without some packages."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# A package that is blocked is one that is not installed: neither found nor imported.
BLOCKER = """
import os, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in os.environ["BLOCKED"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(folder: Path, *words: str, without: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in `folder` without the variables that the Makefile sets, and without some packages."""
    set_by_make = ("TRITON_INTERPRET", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE")
    environment = {name: value for name, value in os.environ.items() if name not in set_by_make}
    (folder / "blocker").mkdir(exist_ok=True)
    (folder / "blocker" / "sitecustomize.py").write_text(BLOCKER if without else "")
    path = os.pathsep.join([str(folder / "blocker"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"PYTHONPATH": path, "BLOCKED": without, "COLUMNS": "200"} | variables
    words = (sys.executable, *words)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def xmla(folder: Path, *words: str, without: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "xmla", *words, without=without, **variables)


# The demo on fewer tokens, though more than are selected.
_SHORT_DEMO = """
from xmla.command import main
from xmla.machine import environment

def prepare_less(prepare=environment.prepare, **given):
    prepare(**given)
    CHANGES

environment.prepare = prepare_less
main()
"""


def short_demo(*changes: str) -> str:
    """A program that is the command after `changes`, statements that follow the imports' preparation."""
    return _SHORT_DEMO.replace("CHANGES", "\n    ".join(changes))
