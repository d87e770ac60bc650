"""xmla's entry points for processes that import it from the tree."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def write(folder: Path, **more: Mapping[str, str]) -> None:
    """Make `folder` a place for PYTHONPATH where Python finds them, and `more` groups of others."""
    installed = folder / "xmla_engine-0.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: xmla-engine\nVersion: 0\n")
    points = PROJECT["entry-points"] | more
    lines = [[f"[{group}]", *(f"{name} = {place}" for name, place in found.items())] for group, found in points.items()]
    (installed / "entry_points.txt").write_text("\n".join("\n".join(group) for group in lines) + "\n")
