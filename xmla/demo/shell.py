"""The demo of any model: build it, run it as shipped and with xmla, tell how far the two agree."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
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


@torch.no_grad()
def show(demo: Demo, details: bool = False) -> list[Figure]:
    """Run the demo of a model, tell it, with `details` all figures, and return them."""
    console = Console()
    say = partial(console.print, soft_wrap=True, markup=False, highlight=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = files("xmla.demo").joinpath("moby_dick.txt").read_bytes()
    tokens = torch.tensor(list(text[: demo.PROMPT + DECODED]), device=device)
    told = {**demo.STORY, "text": f"{demo.PROMPT} tokens of Moby Dick prefilled, {DECODED} decoded one by one"}
    for name, sentence in told.items():
        say(f"{name + ':':<13}{sentence}")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("as shipped", total=1 + demo.PARTS)
        model = demo.build(device)
        shipped = run_as_shipped(model, tokens, demo.PROMPT)
        compared = demo.compare(model, tokens, shipped, lambda part: bar.update(task, advance=1, description=part))
    figures = compared.figures
    failed = [figure for figure in figures if not figure["ok"]]
    verdict = f"{len(figures) - len(failed)} of {len(figures)} figures keep their bounds"
    say(f"\n{'DISAGREES' if failed else 'Agrees'}: {verdict}", style="bold red" if failed else "bold green")
    for kind, meaning in demo.KINDS.items():
        if found := [figure for figure in figures if kind in figure["name"]]:
            say(f"{kind + ':':<13}{', '.join(worst(found))}; {meaning}")
    ours, plain = (agreement(run, shipped) for run in (compared.run, compared.plain))
    say(
        f"next token:  the shipped model's most likely one for {ours:.0%} of the tokens, for {plain:.0%} with plain "
        "rows and the model's selection: fp8 rounds each key and with it the selection, and random weights leave the "
        "best tokens nearly as likely"
    )
    if details or failed:
        console.print(table_of(demo.TITLE, figures if details else failed))
    else:
        say("Every figure beside its bound: xmla demo --details")
    if missing("jax"):
        say(f"left out: torch = JAX, since {needed('jax')}")
    for extra in compared.tables:
        console.print(extra)
    return figures


def agreement(run: Run, shipped: Run) -> float:
    """The share of tokens after which both runs have the same most likely next one."""
    return float((run.logits.argmax(-1) == shipped.logits.argmax(-1)).float().mean())


def worst(figures: Sequence[Figure]) -> Iterator[str]:
    """The worst value of each quantity, in words."""
    by_quantity: dict[str, list[Figure]] = {}
    for figure in figures:
        quantity = "results" if figure["bound"] == "identical" else figure["name"].split(", ")[0]
        by_quantity.setdefault(quantity, []).append(figure)
    for quantity, found in by_quantity.items():
        values = [figure["value"] for figure in found]
        if quantity == "results":
            yield f"{sum(figure['ok'] for figure in found)} of {len(found)} results identical bit for bit"
        elif quantity == "selection":
            yield f"selection {min(values):.0%} the same"
        else:
            yield f"{quantity} within {max(values):.1%}"


def table_of(title: str, figures: Sequence[Figure]) -> Table:
    table = Table("figure", "where", "value", "bound", "", title=title)
    for f in figures:
        value = "identical" if f["bound"] == "identical" and f["ok"] else f"{f['value']:.4f}"
        table.add_row(f["name"], f["where"], value, f["bound"], "[green]ok" if f["ok"] else "[red]DISAGREES")
    return table
