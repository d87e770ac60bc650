"""GLM-5.3-Flash's attention: an indexer selects pools of tokens, and the tokens of the last pool are seen in any case.

transformers makes a mask of the selected tokens; here they take its place. A cache keeps what transformers' own
indexer does: a token's key, its gate and whether it is padding, side by side.
"""

from typing import Any

import torch

from xmla import torch_api as xt
from xmla.transformers import attention
from xmla.transformers.attention import of_16_bits
from xmla.transformers.masks import Visible, without_padding
from xmla.transformers.selection import Keys, head_weights, select


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


@torch.no_grad()
def index(
    indexer: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, attention_mask: torch.Tensor, cache: Any
) -> torch.Tensor:  # fmt: skip
    """The tokens that each query attends to, [B, S, ·] int32, −1 anywhere: of selected pools, and of the last one.

    Pools are counted from the first token that is no padding. One with padding in it is not selected.
    """
    query = of_16_bits(indexer.wq_b(q_resid)).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = indexer.k_norm(indexer.wk(hidden_states))
    gates = torch.nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)
    states = torch.cat([keys, gates, attention_mask[..., None].to(keys.dtype)], -1)
    queries = tokens = hidden_states.shape[1]
    if cache is not None:
        cached = cache.update_indexer(states, indexer.layer_idx)
        states = cached.values if isinstance(cached, Keys) else cached
        tokens = cache.layers[indexer.layer_idx].get_seq_length()
    there = states[..., -1] > 0
    device, length, pool = states.device, states.shape[1], indexer.index_kpool
    first = torch.where(there.any(1), there.to(torch.int8).argmax(1), length)[:, None]
    place = torch.arange(queries, device=device) + (tokens - queries)  # of queries among all tokens
    counts = torch.nn.functional.pad(there.cumsum(1), (1, 0))

    starts = first + torch.arange(length // pool, device=device) * pool
    ends = (starts + pool).clamp(max=length)
    full = counts.gather(1, ends) - counts.gather(1, starts.clamp(max=length)) == pool
    complete = ((place + 1 - first) // pool).clamp(0, length // pool)
    seen = Visible(*(each.to(torch.int32) for each in without_padding(complete, full, length // pool, 0)))
    pooled = Keys(_pooled(indexer, states, there, first, ends).to(query.dtype))
    pools = select(query, head_weights(indexer, hidden_states), pooled, seen, indexer.index_topk // pool)

    inside = torch.arange(pool, device=device)
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


def _pooled(
    indexer: Any, states: torch.Tensor, there: torch.Tensor, first: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Keys [B, P, D] of the pools that end before `ends` [B, P], of tokens' keys and gates in `states`."""
    batch, length = there.shape
    keys, gates, _ = states.split([indexer.head_dim, indexer.head_dim, 1], -1)
    position = torch.where(there, torch.arange(length, device=there.device) - first, -1).to(torch.int32)
    keys, gates = (each.reshape(batch * length, -1) for each in (keys, gates))
    rows = xt.compress_rows(keys, gates, indexer.index_kpool_compress_ape.float(), position.flatten())
    return rows.view(batch, length, -1)[torch.arange(batch, device=there.device)[:, None], ends - 1]
