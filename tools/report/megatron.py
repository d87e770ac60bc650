"""Megatron's layer by its code and by xmla, by `python -m benchmarks.megatron`."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tools.report.layer import cell
from tools.report.markdown import table
from tools.report.results import Line, read
from xmla.bench.provenance import origin

# Megatron's fused backends, which ran in some lines.
FUSED = {"cudnn": "its `cudnn`", "tilelang": "its `tilelang`"}


def gpus(line: Line) -> str:
    shared = {"heads": line["tensor_parallel"], "tokens": line["context_parallel"]}
    names = [f"{count}, {what} shared" for what, count in shared.items() if count > 1]
    return " × ".join(names) or "1"


def origin_and_versions(line: Line) -> str:
    """Where a figure comes from."""
    versions = line["versions"]
    packages = {"Megatron-Core": line["megatron_core"], "torch": versions["torch"], "Triton": versions["triton"]}
    return f"{origin(line)}, {', '.join(f'{name} {version}' for name, version in packages.items())}."


def columns(fused: Sequence[str]) -> list[str]:
    named = [FUSED[name] for name in fused]
    return ["tokens", "GPUs", "loss over", "Megatron's code", *named, "xmla", "speed", "difference"]


def row(line: Line, fused: Sequence[str] = ()) -> tuple[str, ...]:
    """The cells of a run, by `columns`."""
    theirs, ours = line.get("none", {}), line["xmla"]  # of some lengths xmla's step was measured alone
    ratio = f"{theirs['ms'] / ours['ms']:.1f} ×" if "ms" in theirs and "ms" in ours else ""
    apart = f"{max(line['difference'].values()):.1%} at most" if "difference" in line else ""
    loss = "selected keys" if line["sparse_loss"] else "all keys"
    document = line.get("document")
    tokens = f"{line['tokens']:,}" + (f" in documents of {document:,}" if document else "")
    cells = [cell(run) if run else "not run" for run in (theirs, *(line.get(name) for name in fused))]
    return tokens, gpus(line), loss, *cells, cell(ours), ratio, apart


def report(file: Path) -> str:
    """Markdown: for each origin of figures its sentence, then a line per run."""
    markdown: list[str] = []
    for text, group in groupby((line for (line,) in read(file)), key=origin_and_versions):
        lines = [*group]
        fused = [name for name in FUSED if any("ms" in line.get(name, {}) for line in lines)]
        markdown += [text, "", *table(columns(fused), [row(line, fused) for line in lines]), ""]
    return "\n".join(markdown)
