"""The `xmla` command. Commands import what they need when they run, so that `xmla --help` is quick."""

import json
from pathlib import Path
from typing import Annotated

import typer

from xmla.cli import _environment

app = typer.Typer(help="DeepSeek sparse attention for PyTorch and JAX.", no_args_is_help=True, add_completion=False)


@app.callback()
def prepare() -> None:
    _environment.prepare()


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, devices, and whether kernels run compiled or interpreted."""
    from rich.console import Console
    from rich.table import Table

    from xmla.cli.info import collect

    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table("", "", show_header=False)
    for name, value in facts.items():
        table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    Console().print(table)


@app.command()
def demo(out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None) -> None:
    """DeepSeek-V3.2's own model with its attention replaced: selection, outputs, logits, torch against JAX."""
    from xmla.cli.demo import run

    figures = run()
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    raise typer.Exit(code=0 if all(figure["ok"] for figure in figures) else 1)


@app.command()
def verify(op: Annotated[list[str] | None, typer.Option(help="Only these ops.")] = None) -> None:
    """All ops against their definitions, and the two front-ends against each other, on this machine."""
    from xmla.cli.verify import run

    raise typer.Exit(code=0 if run(op) else 1)
