"""Figures of PyTorch's tensors."""

from collections.abc import Iterator, Mapping

import torch

from xmla.demo import figures
from xmla.demo.figures import Figure, equal, figure


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64."""
    return figures.relative_error(got.double().cpu().numpy(), want.double().cpu().numpy())


def overlap(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of the wanted keys that were selected; indices past the token itself are padding."""
    shared = total = 0
    for token, (a, b) in enumerate(zip(got.cpu().tolist(), want.cpu().tolist(), strict=True)):
        chosen = {key for key in b if 0 <= key <= token}
        shared += len(chosen & set(a))
        total += len(chosen)
    return shared / total


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
    return equal(name, where, same)
