"""Digests of what a check has passed, kept in tests/core/compiled; it is repeated for what has another digest.

A digest is of all that the result follows from: kernels, what they are compiled for, and the check. `make matrix`
repeats a check for all that has changed, and writes the digests.
"""

import json
import os
from pathlib import Path

from tools.support_matrix import Line, lines_of

MATRIX = bool(os.environ.get("XMLA_MATRIX"))
FOLDER = Path(__file__).parent.parent / "tests" / "core" / "compiled"


def file_of(check: str) -> Path:
    return FOLDER / f"{check}.json"


def keep(check: str, digests: dict[str, str]) -> None:
    if MATRIX:
        file_of(check).write_text(json.dumps(digests, indent=1) + "\n")


def changed(check: str, script: Path, *arguments: str) -> tuple[dict[str, str], list[Line]]:
    """The digests of now, by name, and a script's lines, which check what has none of them."""
    first, *lines = lines_of(script, *arguments, "--but", str(file_of(check)))
    return dict(first["digests"]), lines
