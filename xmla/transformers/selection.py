"""The keys that queries of a batch attend to."""

from typing import NamedTuple

import torch

from xmla import torch_api as xt
from xmla.transformers.masks import Visible

MOST_SCORES = 1 << 28  # of a call, of 4 bytes each


class Projected(NamedTuple):
    """What an indexer makes of hidden states."""

    query: torch.Tensor  # [B, S, I, D]
    keys: torch.Tensor  # [B, N, D]
    weights: torch.Tensor  # [B, S, I] float32, with all factors of the scores


def select(projected: Projected, seen: Visible, k: int) -> torch.Tensor:
    """The keys of the k highest scores among those that each query sees: [B, S, min(k, N)] int32, −1 at the end."""
    keys = projected.keys
    length = keys.shape[1]
    if length <= k:  # all, whatever their scores
        column = torch.arange(length, dtype=torch.int32, device=keys.device)
        chosen = torch.where(column < (seen.ends - seen.starts)[..., None], column + seen.starts[..., None], -1)
    else:
        if seen.order is not None:
            keys = keys.gather(1, seen.order.long()[..., None].expand_as(keys))
        chosen = _select(projected._replace(keys=keys), seen, k)
    if seen.order is None:
        return chosen
    place = seen.order.gather(1, chosen.clamp(min=0).flatten(1).long()).view(chosen.shape)
    return torch.where(chosen < 0, -1, place)


def _select(projected: Projected, seen: Visible, k: int) -> torch.Tensor:
    query, keys, weights = projected
    batch, queries, length = *query.shape[:2], keys.shape[1]
    if batch * queries * batch * length <= MOST_SCORES:  # a few queries of each sequence: one call for all
        first = torch.arange(batch, dtype=torch.int32, device=keys.device)[:, None] * length
        rows = [each.flatten(0, 1) for each in (query, weights, seen.starts + first, seen.ends + first)]
        chosen = _rows(k, keys.flatten(0, 1), *rows).unflatten(0, (batch, queries))
        return torch.where(chosen < 0, -1, chosen + seen.starts[..., None])
    some = max(1, MOST_SCORES // length)
    chosen = query.new_empty((batch, queries, k), dtype=torch.int32)
    for sequence in range(batch):
        for place in range(0, queries, some):
            rows = [each[sequence, place : place + some] for each in (query, weights, seen.starts, seen.ends)]
            column = _rows(k, keys[sequence], *rows)
            chosen[sequence, place : place + some] = torch.where(column < 0, -1, column + rows[2][:, None])
    return chosen


def _rows(
    k: int, keys: torch.Tensor, query: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Keys of the k highest scores from each row's start on, counted from there."""
    scores = xt.indexer_scores(query, keys, weights, ends, starts)
    return xt.select_topk(scores, ends, starts, k=k)
