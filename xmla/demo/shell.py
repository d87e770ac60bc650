"""The demo of any model: build it, run it as shipped and with xmla, print the figures beside their bounds."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from xmla._frameworks import missing, needed
from xmla.demo.comparisons import Comparison
from xmla.demo.figures import Figure
from xmla.demo.passes import Run, run_as_shipped

DECODED = 8  # tokens


class Demo(Protocol):
    """What the module of a model gives."""

    TITLE: str
    CAPTION: str
    PROMPT: int  # tokens prefilled

    @staticmethod
    def build(device: str) -> Any:
        """A small random model of transformers."""

    @staticmethod
    def compare(model: Any, tokens: torch.Tensor, shipped: Run, begin: Callable[[str], None]) -> Comparison:
        """Run the model with xmla and compare; `begin` shows the part that begins."""


@torch.no_grad()
def show(demo: Demo) -> list[Figure]:
    """Run the demo of a model, print its figures and return them."""
    console = Console()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = files("xmla.demo").joinpath("moby_dick.txt").read_bytes()
    tokens = torch.tensor(list(text[: demo.PROMPT + DECODED]), device=device)
    with console.status("as shipped") as status:
        model = demo.build(device)
        shipped = run_as_shipped(model, tokens, demo.PROMPT)
        compared = demo.compare(model, tokens, shipped, status.update)
    agreement = float((compared.run.logits.argmax(-1) == shipped.logits.argmax(-1)).float().mean())
    console.print(f"{demo.PROMPT} tokens of text prefilled, {DECODED} decoded one by one; the most likely next token "
                  f"is the shipped model's for {agreement:.0%} of them.")  # fmt: skip
    table = Table("figure", "where", "value", "bound", "", title=demo.TITLE, caption=demo.CAPTION)
    for f in compared.figures:
        value = "identical" if f["bound"] == "identical" and f["ok"] else f"{f['value']:.4f}"
        table.add_row(f["name"], f["where"], value, f["bound"], "[green]ok" if f["ok"] else "[red]DISAGREES")
    console.print(table)
    if missing("jax"):
        console.print(f"left out: torch = JAX, since {needed('jax')}", markup=False, soft_wrap=True)
    for extra in compared.tables:
        console.print(extra)
    return compared.figures
