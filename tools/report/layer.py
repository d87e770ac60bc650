"""A layer's training step beside the dense one, by `python -m benchmarks.layer`."""

from pathlib import Path

from tools.report.markdown import table
from tools.report.results import Line, read
from xmla.bench.provenance import origin

NAMES = {"xmla": "xmla", "dense": "dense", "dense_in_jax": "dense in JAX"}


def cell(measured: Line) -> str:
    if "ms" in measured:
        return f"{measured['ms']:.0f} ms, {measured['peak_gib']:.1f} GiB"
    return "failed" if "failed" in measured else "out of memory"


def report(file: Path) -> str:
    """Markdown: where the figures come from, then a line per number of tokens."""
    ((head, *lines),) = read(file)
    versions = head["versions"]
    measured = [name for name in NAMES if name in lines[0]]
    packages = ["torch", "Triton", *(["JAX"] if "dense_in_jax" in measured else [])]
    told = f"{origin(head)}, {', '.join(f'{name} {versions[name.lower()]}' for name in packages)}."
    rows = []
    for line in lines:
        differences = [part["difference"] for part in (line, line.get("dense_in_jax", {})) if "difference" in part]
        apart = f"{max(max(each.values()) for each in differences):.1%} at most" if differences else ""
        rows.append([f"{line['tokens']:,}", *(cell(line[name]) for name in measured), apart])
    columns = ["tokens", *(NAMES[name] for name in measured), "difference of gradients"]
    return "\n".join([told, "", *table(columns, rows)]) + "\n"
