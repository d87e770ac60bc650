"""Entries of a step's prefills, gathered as plain rows that all of their tokens share.

On Hopper attention over rows is faster than over packed entries, by more than it costs to gather them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xmla import torch_api as xt


def rows_are_faster(heads: int) -> bool:
    """Whether attention of prefills is faster over rows, from memory.REUSE references to an entry on.

    Measured on Hopper alone, 4.1 against 6.4 ms for 4096 tokens of V3.2's 128 heads, 0.57 against 0.65 of V4's 64; a
    tile of 16 heads unpacks for nothing.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return heads > 16 and capability is not None and capability.to_int() == 90


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, for which the host does not wait: from pageable memory it may."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def kept(holder: Any, name: str, make: Callable[[], Any]) -> Any:
    """What the first layer of a step made, by a name, in an object that all layers of the step have."""
    values = vars(holder).setdefault("kept_by_xmla", {})
    if name not in values:
        values[name] = make()
    return values[name]


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a step's prefills as those of a pool of their own, whatever table has their ids."""

    page: int  # entries, R
    rows: torch.Tensor  # [P] the request of each page of the pool
    columns: torch.Tensor  # [P] its place in the request's row of a table
    table: torch.Tensor  # [prefills, M] pages of the pool, from each request's first one on
    requests: torch.Tensor  # [prefill tokens] rows of the table

    @classmethod
    def of(
        cls, requests: torch.Tensor, first: torch.Tensor, last: torch.Tensor, page: int, most: int
    ) -> "Pages | None":
        """The pages from `first` to before `last` of each request; None if these are more than `most` entries.

        Both are on the host, so that no call waits for the device, which gets all in one copy.
        """
        count = last - first
        total = int(count.sum())
        if page * total > most:
            return None
        place = torch.arange(int(count.max()))
        inside = place < count[:, None]
        own = torch.where(inside, (count.cumsum(0) - count)[:, None] + place, -1)
        rows, places = inside.nonzero(as_tuple=True)
        together = sent(torch.cat((own.flatten(), rows, first[rows] + places)).int(), requests.device)
        table, rows, columns = together.split((own.numel(), total, total))
        return cls(page, rows, columns, table.view_as(own), requests)

    def gathered(self, table: torch.Tensor) -> "Gathered":
        """Their entries in the cache of a table."""
        own = table[self.rows, self.columns]
        offsets = torch.arange(self.page, dtype=torch.int32, device=own.device)
        return Gathered(self, own, torch.add(offsets, own[:, None], alpha=self.page).flatten())


@dataclass(frozen=True, slots=True)
class Gathered:
    """Entries of pages as rows."""

    pages: Pages
    own: torch.Tensor  # [P] in the cache, the ids of the pages
    slots: torch.Tensor  # [P·R] in the cache, of the pool's entries

    def read(self, cache: torch.Tensor, dims: int, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool [P, R, dims], in scratch memory, and what is left of that."""
        rows = scratch[: len(self.slots) * dims * 2].view(torch.bfloat16).view(-1, dims)
        xt.read_mla_cache(cache, self.slots, out=rows)
        return rows.view(-1, self.pages.page, dims), scratch[rows.nbytes :]

    def places(self, slots: torch.Tensor, pages: int) -> torch.Tensor:
        """Slots [n, K] of a cache of so many pages as slots of the pool, which has all that they name; −1 stays."""
        pool = torch.zeros(1, pages, dtype=torch.int32, device=slots.device)
        pool[0, self.own] = torch.arange(len(self.own), dtype=torch.int32, device=slots.device)
        return xt.map_slots(slots, pool, page_size=self.pages.page)[0]
