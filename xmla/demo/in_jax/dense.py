"""Attention and the indexer's loss over all pairs of tokens, in jax.numpy: what xmla is compared with."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xmla.demo.in_jax.model import Config, Projected

NEVER = -1e30  # a masked logit; −∞ would make gradients NaN


class Leaves(NamedTuple):
    """What a layer leaves beside attention's out, of texts of T tokens, N in all."""

    kl: jax.Array  # the indexer's loss
    selected: jax.Array  # [N, K], keys of a token's own text, −1 where there is none
    overlap: jax.Array  # the share of the K keys that get most attention that are selected, if all were attended to


def causal(tokens: int) -> jax.Array:
    return jnp.tri(tokens, dtype=bool)


def mask_of(selected: jax.Array, tokens: int) -> jax.Array:
    """Which keys of its text each token selected: [..., T]."""
    return (selected[..., None] == jnp.arange(tokens)).any(-2)


def overlap(selected: jax.Array, logits: jax.Array) -> jax.Array:
    """The share of the K keys with most attention of all heads, by logits [B, H, T, T] of all keys, in `selected`."""
    k, tokens = selected.shape[-1], logits.shape[-1]
    attention = jax.nn.softmax(jnp.where(causal(tokens), logits, NEVER)).sum(1)
    best = mask_of(jax.lax.top_k(attention, k)[1], tokens)
    late = jnp.arange(tokens) >= k  # the others select all their keys
    both = (mask_of(selected, tokens) & best & late[:, None]).sum()
    return both / (k * late.sum() * len(logits))


def texts_of(p: Projected, texts: int, dtype: Any) -> tuple[jax.Array, ...]:
    """Queries, rows, and the indexer's queries, keys and weights, each [B, T, …]."""
    arrays = p.query, jnp.concatenate([p.latent, p.k_rope], axis=-1), p.index_q, p.index_k, p.index_weights
    return tuple(array.reshape(texts, -1, *array.shape[1:]).astype(dtype) for array in arrays)


def attend(
    config: Config, texts: int, every: bool, dtype: Any, state: Any, selected: jax.Array | None, p: Projected
) -> tuple[jax.Array, tuple[Any, Leaves]]:
    """Attention over every key of a token's text, or the ones that are `selected` [N, K], or that it selects itself."""
    q, rows, index_q, index_k, index_weights = texts_of(p, texts, dtype)
    tokens, k = q.shape[1], config.index_topk
    products = jax.nn.relu(jnp.einsum("btid,bsd->btis", index_q, index_k))
    scores = jnp.einsum("btis,bti->bts", products, index_weights).astype(jnp.float32) * config.index_scale
    best = jax.lax.top_k(jnp.where(causal(tokens), jax.lax.stop_gradient(scores), NEVER), min(k, tokens))[1]
    mine = jnp.where(best <= jnp.arange(tokens)[:, None], best, -1)
    keys = mine if selected is None else selected.reshape(texts, tokens, -1)
    allowed = causal(tokens) & (every | mask_of(keys, tokens))
    logits = (jnp.einsum("bthe,bse->bhts", q, rows) * config.softmax_scale).astype(jnp.float32)
    attention = jax.nn.softmax(jnp.where(allowed[:, None], logits, NEVER))
    out = jnp.einsum("bhts,bsl->bthl", attention.astype(dtype), rows[..., : config.kv_lora_rank])
    target = jax.lax.stop_gradient(attention.mean(1))
    logs = jax.nn.log_softmax(jnp.where(allowed, scores, NEVER))
    kl = jnp.where(allowed, jax.scipy.special.xlogy(target, target) - target * logs, 0.0).sum() / (texts * tokens)
    leaves = Leaves(kl, mine.reshape(texts * tokens, -1), overlap(keys, jax.lax.stop_gradient(logits)))
    return out.reshape(texts * tokens, *out.shape[2:]), (state, leaves)
