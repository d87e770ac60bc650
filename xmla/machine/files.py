"""Files that a command writes at its end, checked at its start."""

import os
from pathlib import Path

import typer


def writable(path: Path | None) -> Path | None:
    """Refuse, before anything runs, a file that could not be written at the end."""
    if path is not None:
        folder = path.parent
        if not folder.is_dir():
            raise typer.BadParameter(f"{folder} is no folder")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written")
    return path


def drawable(path: Path | None) -> Path | None:
    """Refuse also a picture that matplotlib could not draw."""
    if path is not None:
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError:
            raise typer.BadParameter("pictures need matplotlib: pip install matplotlib") from None
        kinds = FigureCanvasBase.get_supported_filetypes()
        if path.suffix[1:].lower() not in kinds:
            raise typer.BadParameter(f"{path} ends in {path.suffix!r}, expected one of {', '.join(kinds)}")
    return writable(path)
