"""Committed results: files of JSON lines, of one run or several."""

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read(*files: Path) -> list[list[Line]]:
    """The runs of some files: of each the line that names its command, commit and versions, then a line per case."""
    runs: list[list[Line]] = []
    for line in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        if "command" in line:
            runs.append([])
        runs[-1].append(line)
    return runs


def lines_of(file: Path) -> list[Line]:
    """The cases of all runs of a file."""
    return [line for _, *lines in read(file) for line in lines]
