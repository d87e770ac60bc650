"""Digests of what a check has passed, kept in tests/core/compiled; it is repeated for what has another digest.

A digest is of all that the result follows from: kernels, what they are compiled for, and the check. `make matrix`
repeats a check for all that has changed, and writes the digests.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tools.support_matrix import Line, lines_of

# The property of a test whose check has digests: which of these are old.
OLD = "old digests"
MATRIX = bool(os.environ.get("XMLA_MATRIX"))
FOLDER = Path(__file__).parent.parent / "tests" / "core" / "compiled"


def file_of(check: str) -> Path:
    return FOLDER / f"{check}.json"


def keep(check: str, digests: dict[str, str]) -> None:
    if MATRIX:
        file_of(check).write_text(json.dumps(digests, indent=1) + "\n")


def old(check: str, digests: Mapping[str, str]) -> str:
    """Which of the digests of now are not the committed ones, in a few words; nothing, if all are."""
    committed = json.loads(file_of(check).read_text()) if file_of(check).exists() else {}
    names = [name for name, digest in digests.items() if committed.get(name) != digest]
    return f"{check} ({len(names)} of {len(digests)}, such as {names[0]})" if names else ""


def changed(check: str, script: Path, *arguments: str) -> tuple[dict[str, str], list[Line]]:
    """The digests of now, by name, and a script's lines, which check what has none of them."""
    first, *lines = lines_of(script, *arguments, "--but", str(file_of(check)))
    return dict(first["digests"]), lines
