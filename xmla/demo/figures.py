"""Figures of a demo: each a value beside the bound that it must keep."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

Figure = dict[str, Any]  # name, where, value, bound, ok


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def overlap(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of the wanted keys that were selected; indices past the token itself are padding."""
    shared = total = 0
    for token, (a, b) in enumerate(zip(got.cpu().tolist(), want.cpu().tolist(), strict=True)):
        chosen = {key for key in b if 0 <= key <= token}
        shared += len(chosen & set(a))
        total += len(chosen)
    return shared / total


def figure(name: str, where: str, value: float, bounds: Mapping[str, float]) -> Figure:
    """A share of selected keys, which must reach its bound, or an error, which must not exceed it."""
    return bounded(name, where, value, bounds[name], at_least=name.startswith("selection"))


def bounded(name: str, where: str, value: float, bound: float, at_least: bool = False) -> Figure:
    """A value that must not exceed its bound, or must reach it."""
    ok = value >= bound if at_least else value <= bound
    return {"name": name, "where": where, "value": value, "bound": f"{'≥' if at_least else '≤'} {bound:.3g}", "ok": ok}


def errors(
    name: str, where: str, got: torch.Tensor, want: torch.Tensor, prompt: int, bounds: Mapping[str, float]
) -> Iterator[Figure]:
    """The relative errors of prefill, which are the first `prompt` tokens, and of decode."""
    for phase, part in (("prefill", slice(prompt)), ("decode", slice(prompt, None))):
        place = f"{where}, {phase}" if where else phase
        yield figure(name, place, relative_error(got[part], want[part]), bounds)


def identical(name: str, where: str, got: torch.Tensor, want: torch.Tensor) -> Figure:
    """Whether two tensors have the same bits."""
    same = got.dtype == want.dtype and torch.equal(
        got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    )
    return {"name": name, "where": where, "value": float(same), "bound": "identical", "ok": same}
