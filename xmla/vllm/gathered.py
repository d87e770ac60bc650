"""Entries of a step's prefills, gathered as plain rows that all of their tokens share.

On Hopper attention over rows is faster than over packed entries, by more than it costs to gather them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from xmla import torch_api as xt
from xmla.core.call import ALIGNED


def rows_are_faster(heads: int) -> bool:
    """Whether attention of prefills is faster over rows, from memory.MIN_REFERENCES references to an entry on.

    Measured on Hopper alone, 4.1 against 6.4 ms for 4096 tokens of V3.2's 128 heads, 0.57 against 0.65 of V4's 64; a
    tile of 16 heads unpacks for nothing.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return heads > 16 and capability is not None and capability.to_int() == 90


def copy_async(host: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait: from pageable memory it may."""
    values = torch.from_numpy(host)
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


@cache
def cached_arange(count: int, device: torch.device) -> torch.Tensor:
    """0 to before `count`, made once in a process."""
    return torch.arange(count, dtype=torch.int32, device=device)


def once_a_step(holder: Any, name: Hashable, make: Callable[[], Any]) -> Any:
    """What the first layer of a step made, by a name, in an object that all layers of the step have."""
    values = vars(holder).setdefault("made_by_xmla", {})
    if name not in values:
        values[name] = make()
    return values[name]


def once_with_prefills(step: Any, name: Hashable, make: Callable[[], Any]) -> Any:
    """`once_a_step`, but in a step of decodes alone: their graph is captured after a run over the same metadata."""
    return once_a_step(step, name, make) if step.num_prefills else make()


@dataclass(frozen=True, slots=True)
class Pages:
    """Entries of a step's prefills as pages of a pool of their own, whatever table has them in a cache."""

    page: int  # entries of a page of the pool, R
    rows: torch.Tensor  # [P] of a block table, of the requests of the pool's pages
    positions: torch.Tensor  # [P, R] of their entries in these requests
    table: torch.Tensor  # [prefills, M] pages of the pool, from each request's first one on
    shifts: torch.Tensor  # [prefills] from an entry's position to its slot in the pool
    requests: torch.Tensor  # [prefill tokens] rows of `table`

    @classmethod
    def of(
        cls, requests: torch.Tensor, decodes: int, first: np.ndarray, last: np.ndarray, page: int, most: int
    ) -> "Pages | None":
        """The pages from `first` to before `last` of each prefill, whose rows of a block table follow the decodes'.

        None if these are more than `most` entries. Both are on the host, so that no call waits for the device, which
        gets all in one copy.
        """
        count = last - first
        total = int(count.sum())
        if page * total > most:
            return None
        place = np.arange(count.max())
        inside = place < count[:, None]
        before = count.cumsum() - count  # pages of other requests
        own = np.where(inside, before[:, None] + place, -1)
        rows, places = inside.nonzero()
        parts = own.ravel(), rows + decodes, first[rows] + places, (before - first) * page
        begins = np.cumsum([0, *(-(-part.size // ALIGNED) * ALIGNED for part in parts)])
        together, begins = np.zeros(begins[-1], np.int32), begins[:-1].tolist()
        for part, begin in zip(parts, begins, strict=True):
            together[begin : begin + part.size] = part
        values = copy_async(together, requests.device)
        table, rows, columns, shifts = (
            values[begin : begin + part.size] for part, begin in zip(parts, begins, strict=True)
        )
        positions = torch.add(cached_arange(page, requests.device), columns[:, None], alpha=page)
        return cls(page, rows, positions, table.view(own.shape), shifts, requests)

    def slots(self, table: torch.Tensor, page: int) -> torch.Tensor:
        """Slots of the pool's entries [P·R] in the cache of a block table, whose pages may have other sizes."""
        return xt.map_slots(self.positions, table, self.rows, page_size=page)[0].flatten()

    def memory(self, dims: int, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [P·R, dims] in scratch memory, and what is left of that."""
        rows = scratch[: self.positions.numel() * dims * 2].view(torch.bfloat16).view(-1, dims)
        return rows, scratch[rows.nbytes :]

    def windows(self, positions: torch.Tensor, size: int) -> torch.Tensor:
        """Slots [n, size] of the pool, of each token's position and of those before it, while its request has such."""
        newest = positions + self.shifts[self.requests]
        return newest[:, None] - cached_arange(size, positions.device)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Entries of pages as rows."""

    pages: Pages
    slots: torch.Tensor  # [P·R] in the cache, of the pool's entries

    def read(self, cache: torch.Tensor, dims: int, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool [P, R, dims], in scratch memory, and what is left of that."""
        rows, rest = self.pages.memory(dims, scratch)
        xt.read_mla_cache(cache, self.slots, out=rows)
        return rows.view(-1, self.pages.page, dims), rest
