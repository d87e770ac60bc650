"""The keys that queries of a batch attend to."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from xmla import torch_api as xt
from xmla.transformers.masks import Visible

MOST_SCORES = 1 << 27  # of a call, of 4 bytes each


class Projected(NamedTuple):
    """What an indexer makes of hidden states."""

    query: torch.Tensor  # [B, S, I, D]
    keys: torch.Tensor  # [B, N, D]
    weights: torch.Tensor  # [B, S, I] float32, with all factors of the scores


class Keys(NamedTuple):
    """The keys of an indexer's cache, or of the tokens of a pass."""

    values: torch.Tensor  # [B, N, D] of 16 bits, or bytes of e4m3, which fewer operations of PyTorch take
    scales: torch.Tensor | None = None  # [B, N] float32, factors of values in e4m3

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Keys":
        """What a function makes of values and scales."""
        return Keys(function(self.values), None if self.scales is None else function(self.scales))


def head_weights(indexer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Weights of each head, [B, S, I] float32, with all factors of the scores."""
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    return weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)


def quantized(keys: torch.Tensor) -> Keys:
    """Keys in fp8, by the rule of `write_indexer_cache`, which is that of queries."""
    one = torch.ones((keys.shape[:-1].numel(), 1), dtype=torch.float32, device=keys.device)
    values, scales = xt.quantize_indexer_query(keys.reshape(-1, 1, keys.shape[-1]), one, scale=1.0)
    return Keys(values.view(torch.uint8).view(keys.shape), scales.view(keys.shape[:-1]))


def select(query: torch.Tensor, weights: torch.Tensor, keys: Keys, seen: Visible, k: int) -> torch.Tensor:
    """The keys of the k highest scores among those that each query sees: [B, S, min(k, N)] int32, −1 at the end.

    Args:
        query: [B, S, I, D].
        weights: [B, S, I] float32.
        keys: N of each sequence.
        seen: What queries see.
        k: How many are selected.
    """
    length = keys.values.shape[1]
    if length <= k:  # all, whatever their scores
        column = torch.arange(length, dtype=torch.int32, device=query.device)
        return seen.places(torch.where(column < (seen.ends - seen.starts)[..., None], column, -1))
    if seen.order is not None:
        order = torch.arange(len(query), device=query.device)[:, None], seen.order.long()
        keys = keys.each(lambda part: part[order])
    return seen.places(_select(query, weights, keys, seen, k))


def _select(query: torch.Tensor, weights: torch.Tensor, keys: Keys, seen: Visible, k: int) -> torch.Tensor:
    """The keys [B, S, k], counted from the first that each query sees."""
    batch, queries, length = *query.shape[:2], keys.values.shape[1]
    if batch * queries * batch * length <= MOST_SCORES:  # a few queries of each sequence: one call for all
        first = torch.arange(batch, dtype=torch.int32, device=query.device)[:, None] * length
        rows = [each.flatten(0, 1) for each in (query, weights, seen.starts + first, seen.ends + first)]
        return _rows(k, keys.each(lambda part: part.flatten(0, 1)), *rows).unflatten(0, (batch, queries))
    some = max(1, MOST_SCORES // length)
    chosen = query.new_empty((batch, queries, k), dtype=torch.int32)
    for sequence in range(batch):
        of_sequence = keys.each(lambda part, sequence=sequence: part[sequence])
        for place in range(0, queries, some):
            rows = [each[sequence, place : place + some] for each in (query, weights, seen.starts, seen.ends)]
            chosen[sequence, place : place + some] = _rows(k, of_sequence, *rows)
    return chosen


def _rows(
    k: int, keys: Keys, query: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Keys of the k highest scores from each row's start on, counted from there."""
    if keys.scales is None:
        scores = xt.indexer_scores(query, keys.values, weights, ends, starts)
        return xt.select_topk(scores, ends, starts, k=k)
    query8, folded = xt.quantize_indexer_query(query, weights, scale=1.0)  # the weights have all factors
    return xt.indexer_topk(query8, folded, keys.values.view(torch.float8_e4m3fn), keys.scales, starts, ends, k=k)
