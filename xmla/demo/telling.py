"""What the demos say: the model, the verdict, the figures, a training's curves."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from xmla.demo.curves import Training, description, measure, summary
from xmla.demo.figures import Figure


def show_training(demo: Training, console: Console, details: bool = False, picture: Path | None = None) -> list[Figure]:
    """Train a model, print it, with `details` all figures, draw its curves, and return the figures."""
    sizes, model, train = demo.prepare()
    tell(console, {**demo.STORY, "text": description(sizes)})
    with Progress(console=console, transient=True) as bar:
        runs, figures = measure(demo.RUNS, sizes, model, train, bar)
    tell_verdict(console, figures)
    tell(console, summary(sizes, runs))
    if picture is not None:
        from xmla.demo.picture import draw

        draw(demo.TITLE, runs, picture)
    tell_figures(console, demo.TITLE, figures, details, f"{demo.COMMAND} --details")
    return figures


def tell(console: Console, sentences: Mapping[str, str]) -> None:
    for name, sentence in sentences.items():
        console.print(f"{name + ':':<13}{sentence}", soft_wrap=True, markup=False, highlight=False)


def tell_verdict(console: Console, figures: Sequence[Figure]) -> None:
    failed = sum(not figure["ok"] for figure in figures)
    verdict = f"{len(figures) - failed} of {len(figures)} figures keep their bounds"
    word, style = ("DISAGREES", "bold red") if failed else ("Agrees", "bold green")
    console.print(f"\n{word}: {verdict}", style=style, soft_wrap=True, markup=False, highlight=False)


def tell_figures(console: Console, title: str, figures: Sequence[Figure], details: bool, command: str) -> None:
    """All figures as a table, or those that do not keep their bounds."""
    failed = [figure for figure in figures if not figure["ok"]]
    if details or failed:
        console.print(table_of(title, figures if details else failed))
    else:
        console.print(f"Every figure beside its bound: {command}", soft_wrap=True, markup=False, highlight=False)


def worst(figures: Sequence[Figure]) -> Iterator[str]:
    """The worst value of each quantity, in words, with its bound."""
    by_quantity: dict[str, list[Figure]] = {}
    for figure in figures:
        quantity = "results" if figure["bound"] == "identical" else figure["name"].split(", ")[0]
        by_quantity.setdefault(quantity, []).append(figure)
    for quantity, group in by_quantity.items():
        if quantity == "results":
            yield f"{sum(figure['ok'] for figure in group)} of {len(group)} results identical bit for bit"
            continue
        farthest = (min if quantity == "selection" else max)(group, key=lambda figure: figure["value"])
        value, bound = farthest["value"], float(farthest["bound"].split()[-1])
        if quantity == "selection":
            yield f"selection {value:.0%} the same (at least {bound:.0%})"
        else:
            yield f"{quantity} within {value:.1%} (bound {bound * 100:.3g}%)"


def table_of(title: str, figures: Sequence[Figure]) -> Table:
    table = Table("figure", "where", "value", "bound", "", title=title)
    for f in figures:
        value = f"{f['value']:{'.4f' if f['value'] >= 1e-3 else '.2g'}}"
        if f["bound"] == "identical" and f["ok"]:
            value = "identical"
        table.add_row(f["name"], f["where"], value, f["bound"], "[green]ok" if f["ok"] else "[red]DISAGREES")
    return table
