"""What the demos say: the model, the verdict, the figures; of any model in inference, and of the training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from xmla._frameworks import missing, needed
from xmla.demo.comparisons import Comparison
from xmla.demo.figures import Figure
from xmla.demo.passes import Run, run_as_shipped

DECODED = 8  # tokens


class Demo(Protocol):
    """What the module of a model gives."""

    TITLE: str
    STORY: Mapping[str, str]  # what the model is, and what is replaced
    KINDS: Mapping[str, str]  # what is compared, by the part of a figure's name that tells it
    PARTS: int  # that `compare` begins
    PROMPT: int  # tokens prefilled

    @staticmethod
    def build(device: str) -> Any:
        """A small random model of transformers."""

    @staticmethod
    def compare(model: Any, tokens: torch.Tensor, shipped: Run, begin: Callable[[str], None]) -> Comparison:
        """Run the model with xmla and compare; `begin` shows the part that begins."""


def show(demo: Demo, details: bool = False) -> list[Figure]:
    """Run the demo of a model, tell it, with `details` all figures, and return them."""
    console, device = Console(), "cuda" if torch.cuda.is_available() else "cpu"
    text = files("xmla.demo").joinpath("moby_dick.txt").read_bytes()
    tokens = torch.tensor(list(text[: demo.PROMPT + DECODED]), device=device)
    story = {**demo.STORY, "text": f"{demo.PROMPT} tokens of Moby Dick prefilled, {DECODED} decoded one by one"}
    tell(console, story)
    with Progress(console=console, transient=True) as bar, torch.no_grad():
        task = bar.add_task("as shipped", total=1 + demo.PARTS)

        def begin(part: str) -> None:
            bar.update(task, advance=1, description=part)
            if not console.is_terminal:  # where no bar is drawn
                tell(console, {"now": part})

        model = demo.build(device)
        shipped = run_as_shipped(model, tokens, demo.PROMPT)
        compared = demo.compare(model, tokens, shipped, begin)
    figures = compared.figures
    tell_verdict(console, figures)
    for kind, meaning in demo.KINDS.items():
        if of_kind := [figure for figure in figures if kind in figure["name"]]:
            tell(console, {kind: f"{', '.join(worst(of_kind))}; {meaning}"})
    ours, plain = (agreement(run, shipped) for run in (compared.run, compared.plain))
    tell(console, {
        "next token": f"the shipped model's most likely one for {ours:.0%} of the tokens, for {plain:.0%} with plain "
        "rows and the model's selection: fp8 rounds each key and with it the selection, and random weights leave the "
        "best tokens nearly as likely"
    })  # fmt: skip
    tell_figures(console, demo.TITLE, figures, details, "xmla demo --details")
    if missing("jax"):
        tell(console, {"left out": f"torch = JAX, since {needed('jax')}"})
    for extra in compared.tables:
        console.print(extra)
    return figures


def show_training(details: bool = False, picture: Path | None = None) -> list[Figure]:
    """Train DeepSeek-V3.2's model, tell it, with `details` all figures, draw its curves, and return the figures."""
    from xmla.demo import training

    console, device = Console(), "cuda" if torch.cuda.is_available() else "cpu"
    sizes = training.SIZES[device]
    tell(console, training.STORY | {"text": training.description(sizes)})
    with Progress(console=console, transient=True) as bar:
        runs, figures = training.measure(sizes, device, bar)
    tell_verdict(console, figures)
    tell(console, training.summary(sizes, runs))
    if picture is not None:
        from xmla.demo.picture import draw

        draw(training.TITLE, runs, picture)
    tell_figures(console, training.TITLE, figures, details, "xmla demo --train --details")
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


def agreement(run: Run, shipped: Run) -> float:
    """The share of tokens after which both runs have the same most likely next one."""
    return float((run.logits.argmax(-1) == shipped.logits.argmax(-1)).float().mean())


def worst(figures: Sequence[Figure]) -> Iterator[str]:
    """The worst value of each quantity, in words."""
    by_quantity: dict[str, list[Figure]] = {}
    for figure in figures:
        quantity = "results" if figure["bound"] == "identical" else figure["name"].split(", ")[0]
        by_quantity.setdefault(quantity, []).append(figure)
    for quantity, group in by_quantity.items():
        values = [figure["value"] for figure in group]
        if quantity == "results":
            yield f"{sum(figure['ok'] for figure in group)} of {len(group)} results identical bit for bit"
        elif quantity == "selection":
            yield f"selection {min(values):.0%} the same"
        else:
            yield f"{quantity} within {max(values):.1%}"


def table_of(title: str, figures: Sequence[Figure]) -> Table:
    table = Table("figure", "where", "value", "bound", "", title=title)
    for f in figures:
        value = f"{f['value']:{'.4f' if f['value'] >= 1e-3 else '.2g'}}"
        if f["bound"] == "identical" and f["ok"]:
            value = "identical"
        table.add_row(f["name"], f["where"], value, f["bound"], "[green]ok" if f["ok"] else "[red]DISAGREES")
    return table
