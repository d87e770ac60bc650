"""`python -m xmla.bench.megatron_report FILE [--into docs/megatron.md]`: Megatron's layer by its code and by xmla.

The file's lines are those of `python -m xmla.bench.megatron`.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from xmla.bench.layer_report import cell
from xmla.bench.provenance import origin
from xmla.bench.report import show

MARKERS = "<!-- megatron -->\n", "<!-- /megatron -->"
COLUMNS = ("tokens", "GPUs", "loss over", "Megatron's code", "xmla", "speed", "difference")


def gpus(line: dict[str, Any]) -> str:
    shared = {"heads": line["tensor_parallel"], "tokens": line["context_parallel"]}
    names = [f"{count}, {what} shared" for what, count in shared.items() if count > 1]
    return " × ".join(names) or "1"


def origin_and_versions(line: dict[str, Any]) -> str:
    """Where a figure comes from."""
    versions = line["versions"]
    packages = {"Megatron-Core": line["megatron_core"], "torch": versions["torch"], "Triton": versions["triton"]}
    return f"{origin(line)}, {', '.join(f'{name} {version}' for name, version in packages.items())}."


def row(line: dict[str, Any]) -> str:
    theirs, ours = line.get("none", {}), line["xmla"]  # of some lengths xmla's step was measured alone
    ratio = f"{theirs['ms'] / ours['ms']:.1f} ×" if "ms" in theirs and "ms" in ours else ""
    apart = f"{max(line['difference'].values()):.1%} at most" if "difference" in line else ""
    loss = "selected keys" if line["sparse_loss"] else "all keys"
    times = f"{cell(theirs) if theirs else 'not run'} | {cell(ours)}"
    document = line.get("document")
    tokens = f"{line['tokens']:,}" + (f" in documents of {document:,}" if document else "")
    return f"| {tokens} | {gpus(line)} | {loss} | {times} | {ratio} | {apart} |"


def report(file: Path) -> str:
    """Markdown: for each origin of figures its sentence, then a line per run."""
    markdown: list[str] = []
    for text, lines in groupby(map(json.loads, file.read_text().splitlines()), key=origin_and_versions):
        markdown += [
            text,
            "",
            "| tokens | GPUs | loss over | Megatron's code | xmla | speed | difference |",
            "|---" * 7 + "|",
        ]
        markdown += [*map(row, lines), ""]
    return "\n".join(markdown)


def main(
    file: Annotated[Path, typer.Argument(help="JSON lines written by `python -m xmla.bench.megatron`.")],
    into: Annotated[Path | None, typer.Option(help="Put the table between this file's markers.", exists=True)] = None,
) -> None:
    """Print the table in Markdown, or put it in its place."""
    show(report(file), into, MARKERS)


if __name__ == "__main__":
    typer.run(main)
