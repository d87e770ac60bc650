"""The demo of a model of transformers in inference."""

from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress

from xmla._frameworks import missing, needed
from xmla.demo.comparisons import Comparison
from xmla.demo.figures import Figure
from xmla.demo.passes import Run, run_as_shipped
from xmla.demo.telling import tell, tell_figures, tell_verdict, worst

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


def show(demo: Demo, console: Console, details: bool = False) -> list[Figure]:
    """Run the demo of a model, print it, with `details` all figures, and return them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
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


def agreement(run: Run, shipped: Run) -> float:
    """The share of tokens after which both runs have the same most likely next one."""
    return float((run.logits.argmax(-1) == shipped.logits.argmax(-1)).float().mean())
