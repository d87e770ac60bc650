"""Entries of a step's prefills, gathered as plain rows that all of their tokens share.

On Hopper attention over rows is faster than over packed entries, by more than it costs to gather them.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Gathered:
    """Pages of the prefills' requests as a pool of their own."""

    page: int  # entries, R
    slots: torch.Tensor  # [P·R] in the cache, of the pool's entries
    table: torch.Tensor  # [prefills, M] pages of the pool, from each request's first one on
    requests: torch.Tensor  # [prefill tokens] rows of the table

    @classmethod
    def of(
        cls, table: torch.Tensor, requests: torch.Tensor, first: torch.Tensor, last: torch.Tensor, page: int, most: int
    ) -> "Gathered | None":
        """The pages from `first` to before `last` of each row of `table`; None if these are more than `most` entries.

        Both are on the host, so that no call waits for the device.
        """
        count = last - first
        if page * int(count.sum()) > most:
            return None
        place = torch.arange(int(count.max()))
        inside = place < count[:, None]
        own = torch.where(inside, (count.cumsum(0) - count)[:, None] + place, -1).int()
        rows, places = inside.nonzero(as_tuple=True)
        rows, columns, own = (sent(host, table.device) for host in (rows, first[rows] + places, own))
        slots = table[rows, columns, None] * page + torch.arange(page, device=table.device)
        return cls(page, slots.flatten().int(), own, requests)

    def read(self, cache: torch.Tensor, dims: int, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool [P, R, dims], in scratch memory, and what is left of that."""
        rows = scratch[: len(self.slots) * dims * 2].view(torch.bfloat16).view(-1, dims)
        xt.read_mla_cache(cache, self.slots, out=rows)
        return rows.view(-1, self.page, dims), scratch[rows.nbytes :]

    def places(self, slots: torch.Tensor, pages: int) -> torch.Tensor:
        """Slots of a cache of so many pages as slots of the pool, which has all that they name; −1 stays."""
        pool = torch.zeros(pages, dtype=torch.int32, device=slots.device)
        own = self.slots[:: self.page] // self.page
        pool[own.long()] = torch.arange(len(own), dtype=torch.int32, device=slots.device)
        page = (slots // self.page).clamp(0, pages - 1)
        return torch.where(slots < 0, -1, pool[page.long()] * self.page + slots % self.page)
