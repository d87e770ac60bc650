"""GLM-5.3-Flash's attention: an indexer selects pools of tokens, and the tokens of the last pool are seen in any case.

transformers makes a mask of the selected tokens; here they take its place. A cache keeps what transformers' own
indexer does: a token's key, its gate and whether it is padding, side by side.
"""

from typing import Any, NamedTuple

import torch

from xmla import torch_api as xt
from xmla.transformers import attention
from xmla.transformers.asked import asked
from xmla.transformers.attention import of_16_bits
from xmla.transformers.learning import Pools
from xmla.transformers.masks import Seen, Visible, without_padding
from xmla.transformers.selection import Keys, Projected, head_weights, select


def part(layer: Any, whole: dict[str, Any], first: int, last: int) -> torch.Tensor:
    """The mask of the queries from `first` to before `last`."""
    return whole["attention_mask"][:, first:last]


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor, *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """`attention.attend` of the tokens that stand in the mask's place."""
    return attention.attend(module, query, key, value, None, *args, indices=attention_mask, **kwargs)


def chosen(module: Any, topk_indices: torch.Tensor, query_states: torch.Tensor, kv_length: int) -> torch.Tensor:
    """What `attend` gets in the place of a mask: the indices themselves."""
    return topk_indices


class _Groups(NamedTuple):
    """Which tokens are pools, counted from the first token that is no padding.

    Attributes:
        there: [B, N] bool, which tokens are no padding.
        counts: [B, N + 1], how many of these stand before a token.
        place: [S], of the queries among all tokens.
        first: [B, 1], the first token that is no padding.
        ends: [B, P], behind the last token of each pool.
        visible: The pools that each query may select: complete, and without padding.
    """

    there: torch.Tensor
    counts: torch.Tensor
    place: torch.Tensor
    first: torch.Tensor
    ends: torch.Tensor
    visible: Visible

    @classmethod
    def of(cls, there: torch.Tensor, queries: int, tokens: int, pool: int) -> "_Groups":
        """The pools of an array of N tokens, of which `tokens` are written; the last of these are the queries."""
        device, length = there.device, there.shape[1]
        first = torch.where(there.any(1), there.to(torch.int8).argmax(1), length)[:, None]
        place = torch.arange(queries, device=device) + (tokens - queries)
        counts = torch.nn.functional.pad(there.cumsum(1), (1, 0))
        starts = first + torch.arange(length // pool, device=device) * pool
        ends = (starts + pool).clamp(max=length)
        full = counts.gather(1, ends) - counts.gather(1, starts.clamp(max=length)) == pool
        complete = ((place + 1 - first) // pool).clamp(0, length // pool)
        visible = Visible(*(each.to(torch.int32) for each in without_padding(complete, full, length // pool, 0)))
        return cls(there, counts, place, first, ends, visible)


def index(
    indexer: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, attention_mask: torch.Tensor, cache: Any
) -> torch.Tensor:  # fmt: skip
    """The tokens that each query attends to, [B, S, ·] int32, −1 anywhere: of selected pools, and of the last one.

    Pools are counted from the first token that is no padding. One with padding in it is not selected.
    """
    losses, selected = asked()
    if losses is not None:
        losses.refuse(cache)
    pool, queries, device = indexer.index_kpool, hidden_states.shape[1], hidden_states.device
    if selected is not None and losses is None and cache is None:  # nobody reads what is projected
        groups = _Groups.of(attention_mask, queries, queries, pool)
        return _tokens(indexer, groups, groups.visible.places(selected.to(device)), attention_mask)
    with torch.set_grad_enabled(losses is not None and torch.is_grad_enabled()):
        groups, projected = _projected(indexer, hidden_states.detach(), q_resid.detach(), attention_mask, cache)
    count = groups.ends.shape[1]
    if selected is None:
        k = count if losses is not None and losses.dense else indexer.index_topk // pool
        with torch.no_grad():
            pools = select(projected.query, projected.weights, Keys(projected.keys), groups.visible, k)
    else:
        pools = groups.visible.places(selected.to(device))
    if losses is not None:
        slots = attention.slots_of(pools.to(torch.int32), count)
        losses.keep(indexer.layer_idx, projected, groups.visible, Pools(slots, pool))
    return _tokens(indexer, groups, pools, attention_mask)


def seen(layer: Any, whole: dict[str, Any]) -> Seen:
    """Pools that an indexer may select, of a pass without a cache."""
    there = whole["attention_mask"]
    queries = there.shape[1]
    visible = _Groups.of(there, queries, queries, layer.config.index_kpool).visible
    return Seen(visible.ends - visible.starts, there, torch.nn.functional.pad(there[:, 1:], (0, 1)))


def _projected(
    indexer: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, attention_mask: torch.Tensor, cache: Any
) -> tuple[_Groups, Projected]:  # fmt: skip
    query = of_16_bits(indexer.wq_b(q_resid)).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden_states))
    gates = torch.nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)
    states = torch.cat([keys, gates, attention_mask[..., None].to(keys.dtype)], -1)
    queries = tokens = hidden_states.shape[1]
    if cache is not None:
        cached = cache.update_indexer(states, indexer.layer_idx)
        states = cached.values if isinstance(cached, Keys) else cached
        tokens = cache.layers[indexer.layer_idx].get_seq_length()
    groups = _Groups.of(states[..., -1] > 0, queries, tokens, indexer.index_kpool)
    pooled = _pooled(indexer, states, groups).to(query.dtype)
    return groups, Projected(query, pooled, head_weights(indexer, hidden_states))


def _tokens(indexer: Any, groups: _Groups, pools: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The tokens of pools [B, S, K], and those of the last pool, which is not complete."""
    there, counts, place, first, *_ = groups
    pool, length = indexer.index_kpool, there.shape[1]
    inside = torch.arange(pool, device=there.device)
    members = first[..., None, None] + pools[..., None] * pool + inside
    indices = torch.where(pools[..., None] < 0, -1, members).flatten(2)
    if indexer.index_kpool_always_select_tail:
        visible = counts[:, place + 1]
        rest = visible % pool
        tail = (first + visible - rest)[..., None] + inside[:-1]
        seen_there = there.gather(1, tail.clamp(max=length - 1).flatten(1)).view(tail.shape)
        # Where padding stands between tokens, the tail may begin in a pool that is selected.
        twice = (((tail - first[..., None]) // pool)[..., None] == pools[..., None, :]).any(-1)
        real = (inside[:-1] < rest[..., None]) & (tail <= place[:, None]) & seen_there & ~twice
        indices = torch.cat([indices, torch.where(real, tail, -1)], -1)
    return indices.masked_fill(~attention_mask[..., None], -1).to(torch.int32)


def _pooled(indexer: Any, states: torch.Tensor, groups: _Groups) -> torch.Tensor:
    """Keys [B, P, D] of the pools, of tokens' keys and gates in `states`."""
    there, first, ends = groups.there, groups.first, groups.ends
    batch, length = there.shape
    keys, gates, _ = states.split([indexer.head_dim, indexer.head_dim, 1], -1)
    position = torch.where(there, torch.arange(length, device=there.device) - first, -1).to(torch.int32)
    keys, gates = (each.reshape(batch * length, -1) for each in (keys, gates))
    rows = xt.compress_rows(keys, gates, indexer.index_kpool_compress_ape.float(), position.flatten())
    return rows.view(batch, length, -1)[torch.arange(batch, device=there.device)[:, None], ends - 1]
