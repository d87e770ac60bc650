"""Host time of a jitted JAX decode step, beside that of a jitted addition; what caches cost, as arrays and as Refs."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from xmla import jax_api
from xmla.bench.host_time import host_us
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32

PAGES, PAGE, HEADS, INDEX_HEADS, KEYS, K = 64, 64, 16, 64, 512, 64
COUNTS = (1, 16, 64)  # of caches


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


def cache_lines(count: int) -> Iterator[dict[str, Any]]:
    """What a jitted step that does next to nothing costs with so many caches: as donated arrays, and as Refs."""
    arrays, x = [jnp.ones((256, 256)) for _ in range(count)], jnp.ones((8, 128))
    refs = [jax.new_ref(array) for array in arrays]

    def donated_step(arrays: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return [array + 1 for array in arrays], x + 1

    def ref_step(refs: list[jax.Ref], x: jax.Array) -> jax.Array:
        for ref in refs:
            ref[0, 0] = 1.0
        return x + 1

    by_donation, by_refs = jax.jit(donated_step, donate_argnums=0), jax.jit(ref_step)

    def step() -> None:
        arrays[:], _ = by_donation(arrays, x)

    for way, call, wait in (
        ("donated arrays", step, lambda: jax.block_until_ready(arrays)),
        ("Refs", lambda: by_refs(refs, x), lambda: jax.block_until_ready(refs[-1][...])),
    ):
        yield {"op": "jit", "case": f"{count} {way}", "host_us": host_us(call, wait)}


def lines() -> Iterator[dict[str, Any]]:
    arrays, attrs = arguments()
    step = jax.jit(lambda *operands: jax_api.dsa_attention(*operands, **attrs))
    trivial = jax.jit(lambda x: x + 1)

    def wait() -> None:
        jax.block_until_ready(trivial(arrays[2]))

    ours, addition = host_us(lambda: step(*arrays), wait), host_us(lambda: trivial(arrays[2]), wait)
    case = "dispatch of a jitted JAX step"
    yield {"op": "dsa_attention", "case": case, "host_us": ours, "jitted_addition_us": addition}
    for count in COUNTS:
        yield from cache_lines(count)
