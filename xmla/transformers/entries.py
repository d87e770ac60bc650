"""DeepSeek-V4's attention: a window of keys and compressed entries under one softmax.

transformers joins the rows of a window and the entries, and appends what the compressor says of the entries to the
mask. Here a mask is [B, 1, S, 2 + E] int32: the first row of each query's window, how many it has, and entries that it
attends to, counted from the end of all rows; 0 is none.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import and_masks, padding_mask_function, prepare_padding_mask

from xmla import torch_api as xt
from xmla.core.errors import UnsupportedError
from xmla.transformers.asked import asked
from xmla.transformers.attention import autocast, flat, hooked, of_16_bits, slots_of
from xmla.transformers.learning import IndexerLoss
from xmla.transformers.masks import Seen, Visible, bounds
from xmla.transformers.replay import Selections
from xmla.transformers.selection import Keys, Projected, select


def window(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, *,
    mask_function: Callable[..., Any], local_size: int, attention_mask: torch.Tensor | None = None, device: Any = None,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    """What transformers asks for in place of a mask: the window's rows of each query, [B, 1, S, 2] int32.

    Raises:
        UnsupportedError: A query's rows are not one after another.
    """
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    query = torch.arange(q_length, device=device)[:, None] + q_offset
    key = query + torch.arange(1 - local_size, 1, device=device)
    within = (key >= kv_offset) & (key < kv_offset + kv_length)
    sequence = torch.arange(batch_size, device=device)[:, None, None]
    seen = mask_function(sequence, 0, query, key.clamp(kv_offset, kv_offset + kv_length - 1)) & within
    starts, ends = bounds(seen.expand(batch_size, q_length, local_size))
    return torch.stack([starts + key[:, 0] - kv_offset, ends - starts], -1).to(torch.int32)[:, None]


def part(attention: Any, whole: dict[str, Any], first: int, last: int) -> torch.Tensor:
    """The mask of the queries from `first` to before `last`, behind others that are in the cache."""
    mask = whole["attention_mask"][:, :, first:last].clone()
    before = whole["cache"].get_seq_length(attention.layer_idx)
    dropped, at_first = (max(0, each - attention.sliding_window + 1) for each in (before, before - first))
    mask[..., 0] -= dropped - at_first  # rows that the cache has not any more
    return mask


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float, *, s_aux: torch.Tensor, dropout: float = 0.0, indexer_loss: IndexerLoss | None = None,
    selections: Selections | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of queries [B, H, S, D] to rows [B, 1, N, D], which are values too: out [B, S, H, D].

    Raises:
        UnsupportedError: There is dropout, a mask of another kind, or another dtype than bfloat16 and float16, of
            autocast where it is on.
    """
    if dropout:
        raise UnsupportedError(f"xmla.transformers: attention_dropout is {dropout}, supported: 0")
    if attention_mask.dtype != torch.int32:
        raise UnsupportedError(
            f"xmla.transformers: attention_mask is {attention_mask.dtype} of shape {tuple(attention_mask.shape)}, "
            "supported are masks of [batch, keys] and none"
        )
    query, key = of_16_bits(query), autocast(key)
    batch, _, queries, _ = query.shape
    first, count, entries = attention_mask[:, 0].split([1, 1, attention_mask.shape[-1] - 2], -1)
    place = torch.arange(module.sliding_window, dtype=torch.int32, device=query.device)
    chosen = [torch.where(place < count, first + place, -1), torch.where(entries < 0, entries + key.shape[2], -1)]
    rows, apart = flat(key[:, 0])
    q, sink, scale = query.transpose(1, 2).flatten(0, 1), s_aux.float(), float(scaling)
    out, lse = xt.sparse_mla(
        q, rows, slots_of(torch.cat(chosen, -1), apart), sink=sink, softmax_scale=scale,
        batch_invariant=selections is not None and selections.batch_invariant,
    )  # fmt: skip
    out = out.unflatten(0, (batch, queries))
    if indexer_loss is None or getattr(module.compressor, "indexer", None) is None:
        return out, None
    last = key.shape[2] - queries  # there is no cache, so that the others are as many rows as there are queries
    own = slots_of(torch.where(entries < 0, entries + last, -1), last)
    lse = torch.logaddexp(lse, sink)  # a head's probabilities are its share of the sum over heads
    return indexer_loss.joined(module, out, q, key[:, 0, queries:].flatten(0, 1)[:, None], own, lse, scale), None


def seen(layer: Any, whole: dict[str, Any]) -> Seen:
    """Entries that an indexer may select, of a pass without a cache."""
    attention_mask, positions = whole["attention_mask"], whole["position_ids"]
    queries = attention_mask.shape[2]
    first, count = attention_mask[:, 0, :, 0], attention_mask[:, 0, :, 1]
    place = torch.arange(queries, device=first.device)
    real = (count > 0) & (first + count - 1 == place)
    indexer = layer.compressor.indexer
    complete = _complete(indexer, positions, queries // indexer.compress_rate).expand(len(real), -1)
    return Seen(complete, real, torch.nn.functional.pad(positions[:, 1:] > positions[:, :-1], (0, 1)))


def heavily(
    compressor: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, position_ids: torch.Tensor, cache: Any,
    layer_idx: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A compressor without indexer: its entries [B, 1, T, D], all of which are attended to, and their numbers."""
    entries = _entries(compressor, "compressor", hidden_states, cache, layer_idx)
    count = entries.shape[1]
    place = torch.arange(count, dtype=torch.int32, device=entries.device)
    # A token that comes alone attends to all, whatever its position.
    there = place >= 0 if hidden_states.shape[1] == 1 else place < _complete(compressor, position_ids, count)[..., None]
    numbers = torch.where(there, place - count, 0)
    return entries[:, None], numbers.expand(len(entries), hidden_states.shape[1], -1)[:, None]


def sparsely(
    compressor: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, position_ids: torch.Tensor, cache: Any,
    layer_idx: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A compressor with an indexer: its entries [B, 1, T, D], and the numbers of those that the indexer selects."""
    entries = _entries(compressor, "compressor", hidden_states, cache, layer_idx)
    chosen = compressor.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)
    return entries[:, None], torch.where(chosen < 0, 0, chosen - entries.shape[1])[:, None]


def index(
    indexer: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, position_ids: torch.Tensor, cache: Any,
    layer_idx: int,
) -> torch.Tensor:  # fmt: skip
    """The entries that each query selects, [B, S, min(k, T)] int32, −1 at the end."""
    losses, selected = asked()
    if losses is not None:
        losses.refuse(cache)
    if selected is not None and losses is None and cache is None:  # nobody reads what is projected
        return selected.to(hidden_states.device)
    hidden_states, q_residual = hidden_states.detach(), q_residual.detach()
    with torch.set_grad_enabled(losses is not None and torch.is_grad_enabled()):
        keys = _entries(indexer, "indexer", hidden_states, cache, layer_idx)
        query = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim))
        query = _rotated(indexer, query, hidden_states, position_ids)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden_states).float() * (scorer.weights_scaling * scorer.softmax_scale)
        projected = Projected(of_16_bits(query), autocast(keys), weights)
    ends = _complete(indexer, position_ids, keys.shape[1]).expand(len(keys), -1)
    visible = Visible(torch.zeros_like(ends), ends, None)
    if losses is not None:
        losses.keep(layer_idx, projected, visible)
    if selected is not None:
        return selected.to(hidden_states.device)
    k = keys.shape[1] if losses is not None and losses.dense else indexer.index_topk
    with torch.no_grad():
        return select(projected.query, weights, Keys(projected.keys), visible, k)


def _complete(compressor: Any, position_ids: torch.Tensor, count: int) -> torch.Tensor:
    """How many of `count` entries are complete at each position, [·, S] int32."""
    return ((position_ids + 1) // compressor.compress_rate).clamp(0, count).to(torch.int32)


def _rotated(module: Any, x: torch.Tensor, like: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Rows [B, S, H, D] whose last dims are rotated, by angles of the dtype of `like`."""
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    angles = module.rotary_emb(like, position_ids=position_ids, layer_type=module.rope_layer_type)
    return rotate(x, *angles, unsqueeze_dim=2)


def _entries(module: Any, name: str, hidden_states: torch.Tensor, cache: Any, layer_idx: int) -> torch.Tensor:
    """All entries so far, [B, T, D], of which the cache keeps those that came before.

    Raises:
        UnsupportedError: The cache has no place for entries, or the model another dtype than bfloat16 and float16.
    """
    kv, gate = of_16_bits(module.kv_proj(hidden_states)), module.gate_proj(hidden_states)
    if cache is None:
        whole = kv.shape[1] // module.compress_rate * module.compress_rate
        return _compressed(module, kv[:, :whole], gate[:, :whole], 0)
    layer = cache.layers[layer_idx]
    if not hasattr(layer, "store_compression_weights"):
        raise UnsupportedError(
            f"xmla.transformers: layer {layer_idx} of a {type(cache).__name__} keeps no compressed entries, supported: "
            "DynamicCache(config=model.config)"
        )
    kv, gate, first = layer.store_compression_weights(name, kv, gate)
    groups = 0
    if kv.shape[1] and kv.shape[2] > module.head_dim:
        kv, gate, groups = _behind(module, name, layer, kv, gate)
    entries = _compressed(module, kv, gate, first - groups * module.compress_rate)
    return layer.update_compressor_states(name, entries[:, groups:])


def _behind(
    module: Any, name: str, layer: Any, kv: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:  # fmt: skip
    """Projections behind those of the group before them, whose first series the next entry has, and the groups added.

    The cache keeps that series, its gates with their bias.
    """
    ratio, dim = module.compress_rate, module.head_dim
    last = gate[:, None, -ratio:] + module.position_bias
    before, biased = layer.update_overlap_state(name, kv[:, None, -ratio:], last, dim)
    if before is None:
        return kv, gate, 0
    first_series = before, biased - module.position_bias[:, :dim]
    kv, gate = (
        torch.cat([nn.functional.pad(old.to(new.dtype), (0, dim)), new], 1)
        for old, new in zip(first_series, (kv, gate), strict=True)
    )
    return kv, gate, 1


def _compressed(module: Any, kv: torch.Tensor, gate: torch.Tensor, first: int) -> torch.Tensor:
    """Entries [B, N / r, D] of projections [B, N, ·] of whole groups of tokens, from position `first` on."""
    batch, tokens, _ = kv.shape
    if not tokens:
        return kv.new_zeros((batch, 0, module.head_dim))
    positions = torch.arange(first, first + tokens, dtype=torch.int32, device=kv.device)
    norm = module.kv_norm
    rows = xt.compress_rows(
        kv.flatten(0, 1), gate.flatten(0, 1), module.position_bias.float(), positions.repeat(batch),
        _weight(norm, kv.device), eps=norm.variance_epsilon,
    )  # fmt: skip
    ratio = module.compress_rate
    entries = rows.view(batch, tokens // ratio, ratio, -1)[:, :, -1:]
    starts = positions[None, ::ratio].expand(batch, -1)
    return _rotated(module, entries, entries, starts)[:, :, 0].to(kv.dtype)


def _weight(norm: Any, device: torch.device) -> torch.Tensor:
    """The weight [D] of a norm: its own, or if hooks bring it from elsewhere what becomes of ones."""
    if not hooked(norm):
        return norm.weight
    ones = torch.ones(norm.weight.shape, dtype=torch.float32, device=device)
    return norm(ones).float() * (1 + norm.variance_epsilon) ** 0.5
