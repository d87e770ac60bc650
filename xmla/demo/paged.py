"""What replaces a model's attention: paged caches of one request, and a forward that records its calls of ops."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from xmla import torch_api
from xmla.machine.calls import as_tuple


@dataclass
class Pool:
    """Shuffled pages for the entries of one request, in a pool in which everything else is NaN."""

    pages: torch.Tensor  # [P, R, ROW]
    block_table: torch.Tensor  # [1, M]

    @classmethod
    def empty(cls, entries: int, page_size: int, row: int, dtype: torch.dtype, device: str) -> "Pool":
        count = -(-entries // page_size)
        shape = (count + 2, page_size, row * dtype.itemsize)
        order = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count]
        pages = torch.full(shape, 255, dtype=torch.uint8, device=device).view(dtype)
        return cls(pages, order.to(device=device, dtype=torch.int32)[None])

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """The slots [T] of these positions [T]."""
        size = self.pages.shape[1]
        return self.block_table[0, positions // size] * size + (positions % size).to(torch.int32)


@dataclass
class Call:
    """One call of an op: its arguments and its results."""

    op: str
    tensors: Sequence[torch.Tensor | None]
    attrs: dict[str, Any]
    results: tuple[torch.Tensor, ...]


@dataclass
class PagedAttention(ABC):
    """The forward of one layer's attention over paged caches, with the module's own weights.

    `steps` has the calls of each step, `projected` the layer's output [T, hidden] and `indices` its selection [T, K].
    """

    module: Any
    pools: dict[str, Pool]
    implementation: str | None = field(default=None, kw_only=True)
    steps: list[list[Call]] = field(default_factory=list, init=False)
    projected: list[torch.Tensor] = field(default_factory=list, init=False)
    indices: list[torch.Tensor] = field(default_factory=list, init=False)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: Any, position_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        if len(hidden_states) != 1:
            raise ValueError(f"one request at a time, got {len(hidden_states)}")
        self.steps.append([])
        projected = self.attend(hidden_states, position_embeddings, position_ids.reshape(-1).to(torch.int32))
        self.projected.append(projected[0])
        return projected, None

    @abstractmethod
    def attend(self, hidden_states: torch.Tensor, position_embeddings: Any, positions: torch.Tensor) -> torch.Tensor:
        """Write the tokens' entries and attend: [1, T, hidden] and positions [T] to [1, T, hidden]."""

    def call(self, op: str, *tensors: torch.Tensor | None, **attrs: Any) -> Any:
        """Call an op of `xmla.torch_api` and record the call."""
        results = getattr(torch_api, op)(*tensors, **attrs, implementation=self.implementation)
        self.steps[-1].append(Call(op, tensors, attrs, as_tuple(results)))
        return results
