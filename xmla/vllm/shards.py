"""Decode context parallelism: each rank has every W-th run of a request's keys, selects from them, and shows the rest.

Slots of keys, each rank's block tables and the merge of attention by lse are vLLM's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xmla import torch_api as xt
from xmla.core.call import whole_vectors
from xmla.core.parallel import Ownership

# Tokens whose candidates are exchanged at a time: 2 · (1 + W) · K words for each, besides the workspace.
ROWS = 512


def at_once(columns: int, scratch: int) -> int:
    """Tokens whose candidates are exchanged at a time, with logits of so many keys in so many bytes."""
    return whole_vectors(min(ROWS, scratch // (4 * columns)))


@dataclass(frozen=True, slots=True)
class Shards:
    """The ranks of a group and the keys of this one; `gather` makes [W · n, …] of every rank's [n, …]."""

    ownership: Ownership
    rank: int
    gather: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, ranks: int, rank: int, interleave: int) -> "Shards | None":
        """The ranks of vLLM's group, if it has more than one. Adjacent keys of a rank are a page of `Ownership`."""
        if ranks == 1:
            return None
        from vllm.distributed import get_dcp_group

        return cls(Ownership(ranks, interleave), rank, lambda sent: get_dcp_group().all_gather(sent, dim=0))

    def own(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions within a request as places among this rank's keys of it; −1 for other ranks' and for −1."""
        block, ranks = self.ownership.block, self.ownership.ranks
        places = positions // (ranks * block) * block + positions % block
        return torch.where(self.ownership.owner(positions) == self.rank, places, -1)

    def select(
        self, logits: Callable[..., Any], columns: int, ends: torch.Tensor, starts: torch.Tensor | None,
        scratch: torch.Tensor, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Positions of the k keys of each token with the largest logits over all ranks, to `out` [T, K].

        `logits(rows, out=…)` computes those of this rank's keys, of which a token has `starts` to `ends`. Columns are
        equally many on every rank, so that all of them exchange the same tokens at a time.
        """
        (tokens, k), most = out.shape, at_once(columns, scratch.numel())
        for first in range(0, tokens, most):
            rows = slice(first, min(first + most, tokens))
            scores = scratch[: 4 * columns * (rows.stop - first)].view(torch.float32).view(-1, columns)
            logits(rows, out=scores)
            begins = None if starts is None else starts[rows]
            places = xt.select_topk(scores, ends[rows], begins, k=k)
            at = places if begins is None else places + begins[:, None]
            values = scores.gather(1, at.clamp(0, columns - 1).long()).view(torch.int32)
            sent = torch.stack((values, self.ownership.position(places, self.rank)))
            every = self.gather(sent[None])
            values = torch.empty_like(out[rows], dtype=torch.float32)
            xt.merge_topk(every[:, 0].view(torch.float32), every[:, 1], k=k, out=(values, out[rows]))
