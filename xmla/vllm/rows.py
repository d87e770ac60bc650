"""Selections of an engine's requests, for a trainer that attends to the same keys: XMLA_SELECTIONS_GIB.

Each layer that selects has a row for each slot of its cache, in memory of the host. A token's row is written by the
device, in a graph too, to the place where the token's key is. So a prefix that is found in the cache has the rows of
the request that computed it, and there are never more rows than slots.
"""

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np
import torch

from xmla.core.errors import ArgumentError

GIB = 1 << 30
UNWRITTEN = -2


class Rows:
    """Rows of each slot, and of requests that have ended until they are taken, in as many GiB as `limit` says.

    Args:
        layers: Numbers of the layers that select.
        slots: Of a layer's cache.
        topk: Keys of a row.
        limit: XMLA_SELECTIONS_GIB.
        on_device: What the device sees of memory of the host.

    Attributes:
        views: Of each layer the rows [slots + 1, topk] int32 as the device sees them; the last is of no slot.
        summary: How many bytes are of what.
        room: Bytes for rows of requests that have ended.
        ended: These rows [layers, n, topk], by the requests' names.

    Raises:
        ArgumentError: The rows of all slots do not fit.
    """

    def __init__(
        self, layers: Sequence[int], slots: int, topk: int, limit: float,
        on_device: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        size = 4 * len(layers) * (slots + 1) * topk
        factors = f"{len(layers)} layers, {slots} tokens of the cache, {topk} keys, 4 bytes"
        self.summary = f"{size / GIB:.2f} GiB for selections: {factors}"
        self.room = int(limit * GIB) - size
        if self.room < 0:
            least = ceil(100 * size / GIB) / 100
            raise ArgumentError(
                f"XMLA_SELECTIONS_GIB is {limit:g}, expected at least {least:g}: {self.summary}; a smaller cache takes "
                "less"
            )
        self.layers = [*layers]
        self._host = torch.full((len(layers), slots + 1, topk), UNWRITTEN, dtype=torch.int32)
        self.views = dict(zip(layers, on_device(self._host), strict=True))
        self.ended: dict[str, torch.Tensor] = {}

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [layers, n, topk] at `slots` [n], which the device has written."""
        return self._host[:, slots]

    def copy_pages(self, page: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy rows of pages as the cache's are copied, in the device's order."""
        source, target = torch.tensor(pairs).T
        for rows in self.views.values():
            pages = rows[:-1].view(-1, page, rows.shape[1])
            pages[target.to(rows.device)] = pages[source.to(rows.device)]

    def end(self, name: str, slots: torch.Tensor) -> None:
        """Keep the rows of a request whose slots become others'. The oldest rows go where there is no room."""
        self.ended[name] = self.read(slots)
        while sum(each.nbytes for each in self.ended.values()) > self.room:
            del self.ended[next(iter(self.ended))]

    def checked(self, name: str, rows: torch.Tensor, tokens: int) -> dict[int, np.ndarray]:
        """The rows [tokens, topk] of each layer.

        Raises:
            ArgumentError: There are fewer, or a token has none.
        """
        if rows.shape[1] < tokens:
            raise ArgumentError(f"save_selections: request {name} has {rows.shape[1]} tokens, expected {tokens}")
        rows = rows[:, :tokens]
        if (missing := (rows[..., 0] == UNWRITTEN).nonzero()).numel():
            layer, token = missing[0].tolist()
            raise ArgumentError(
                f"save_selections: request {name} has no selection of token {token} in layer {self.layers[layer]}"
            )
        return {layer: each.numpy() for layer, each in zip(self.layers, rows, strict=True)}


def write(rows: torch.Tensor, slots: torch.Tensor, selected: torch.Tensor) -> None:
    """Write what tokens selected [T, K] to the rows of their `slots` [T]; a negative slot is padding's."""
    places = torch.where(slots < 0, len(rows) - 1, slots)
    rows.index_copy_(0, places.long(), selected[: len(places)])
