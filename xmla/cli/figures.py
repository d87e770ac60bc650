"""Figures of a demo: each a value beside the bound that it must keep."""

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from xmla._frameworks import missing, needed

Figure = dict[str, Any]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def overlap(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of the wanted keys that were selected; a key after the token itself is no pick but filling."""
    shared = total = 0
    for token, (a, b) in enumerate(zip(got.cpu().tolist(), want.cpu().tolist(), strict=True)):
        chosen = {key for key in b if 0 <= key <= token}
        shared += len(chosen & set(a))
        total += len(chosen)
    return shared / total


def figure(name: str, where: str, value: float, bounds: Mapping[str, float]) -> Figure:
    """A share of keys, which must reach its bound, or an error, which must stay below it."""
    at_least = name.startswith("selection")
    bound = bounds[name]
    ok = value >= bound if at_least else value <= bound
    return {"name": name, "where": where, "value": value, "bound": f"{'≥' if at_least else '≤'} {bound}", "ok": ok}


def identical(name: str, where: str, got: torch.Tensor, want: torch.Tensor) -> Figure:
    """Whether two tensors have the same bits."""
    same = got.dtype == want.dtype and torch.equal(
        got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    )
    return {"name": name, "where": where, "value": float(same), "bound": "identical", "ok": same}


def show(figures: list[Figure], console: Console, title: str, caption: str) -> None:
    table = Table("figure", "where", "value", "bound", "", title=title, caption=caption)
    for f in figures:
        value = "identical" if f["bound"] == "identical" and f["ok"] else f"{f['value']:.4f}"
        table.add_row(f["name"], f["where"], value, f["bound"], "[green]ok" if f["ok"] else "[red]DISAGREES")
    console.print(table)


def tell_left_out(console: Console) -> None:
    """A line where JAX is not installed, and so nothing was compared with it."""
    if missing("jax"):
        console.print(f"left out: torch = JAX, since {needed('jax')}", markup=False, soft_wrap=True)
