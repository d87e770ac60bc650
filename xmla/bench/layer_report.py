"""`python -m xmla.bench.layer_report FILE [--into docs/training.md]`: a layer's training step beside the dense one.

The file's lines are those of `python -m xmla.bench.layer`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from xmla.bench.report import read, show

MARKERS = "<!-- layer -->\n", "<!-- /layer -->"


def cell(measured: dict[str, Any]) -> str:
    return f"{measured['ms']:.0f} ms, {measured['peak_gib']:.1f} GiB" if "ms" in measured else "out of memory"


def report(file: Path) -> str:
    """Markdown: where the figures come from, then a line per number of tokens."""
    ((head, *lines),) = read([file])
    versions = head["versions"]
    shown = [
        f"{', '.join(versions['devices'])}, {head['date']}, commit {head['commit'][:12]}, torch {versions['torch']}, "
        f"Triton {versions['triton']}.",
        "",
        "| tokens | xmla | dense | difference of gradients |",
        "|---|---|---|---|",
    ]
    for line in lines:
        apart = f"{max(line['difference'].values()):.1%} at most" if "difference" in line else ""
        shown.append(f"| {line['tokens']:,} | {cell(line['xmla'])} | {cell(line['dense'])} | {apart} |")
    return "\n".join(shown) + "\n"


def main(
    file: Annotated[Path, typer.Argument(help="JSON lines written by `python -m xmla.bench.layer`.")],
    into: Annotated[Path | None, typer.Option(help="Put the table between this file's markers.", exists=True)] = None,
) -> None:
    """Print the table in Markdown, or put it in its place."""
    show(report(file), into, MARKERS)


if __name__ == "__main__":
    typer.run(main)
