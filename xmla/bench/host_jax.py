"""Host time of a jitted JAX decode step: its dispatch, beside that of a jitted addition."""

from typing import Any

import jax
import jax.numpy as jnp

from xmla import jax_api
from xmla.bench.host_time import host_us
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32

PAGES, PAGE, HEADS, INDEX_HEADS, KEYS, K = 64, 64, 16, 64, 512, 64


def arguments() -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """A small decode step of one request, over caches in which every entry holds a key."""
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    entries = PAGES * PAGE
    slots = jnp.arange(entries, dtype=jnp.int32)
    mla = jnp.zeros((PAGES, PAGE, V32.row), jnp.uint8)
    mla = jax_api.write_mla_cache(normal(entries, V32.latent), normal(entries, V32.rope), slots, mla)
    indexer = jnp.zeros((PAGES, PAGE, IndexerLayout(128).row), jnp.uint8)
    indexer = jax_api.write_indexer_cache(normal(entries, 128), slots, indexer)
    q, index_q = normal(1, HEADS, 576), normal(1, INDEX_HEADS, 128)
    weights = normal(1, INDEX_HEADS).astype(jnp.float32)
    table, lengths = jnp.arange(PAGES, dtype=jnp.int32)[None], jnp.full((1,), KEYS, jnp.int32)
    return (q, index_q, weights, mla, indexer, table, lengths), {"k": K, "softmax_scale": 0.1}


def lines() -> list[dict[str, Any]]:
    arrays, attrs = arguments()
    step = jax.jit(lambda *given: jax_api.dsa_attention(*given, **attrs))
    trivial = jax.jit(lambda x: x + 1)

    def wait() -> None:
        jax.block_until_ready(trivial(arrays[2]))

    ours, addition = host_us(lambda: step(*arrays), wait), host_us(lambda: trivial(arrays[2]), wait)
    case = "dispatch of a jitted JAX step"
    return [{"op": "dsa_attention", "case": case, "host_us": ours, "jitted_addition_us": addition}]
