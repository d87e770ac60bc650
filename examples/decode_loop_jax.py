"""A decode loop in JAX: paged fp8 caches, donated, two tokens per request, one jitted step that never traces again.

python examples/decode_loop_jax.py [steps]

Without a GPU the kernels are interpreted, at toy size.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

GPU = Path("/dev/nvidiactl").exists()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from xmla import jax_api as xj

REQUESTS, HEADS, INDEX_HEADS, CONTEXT, K = (64, 128, 64, 16384, 2048) if GPU else (2, 4, 4, 90, 32)
NEXT_N, PAGE_SIZE = 2, 64
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else (200 if GPU else 2)
if STEPS < 1:
    sys.exit(f"steps is {STEPS}, expected at least 1")
PAGES = -(-(CONTEXT + NEXT_N * STEPS) // PAGE_SIZE)  # a request
TOKENS = REQUESTS * NEXT_N

traces: list[int] = []


def normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def map_positions(position: jax.Array, block_table: jax.Array) -> jax.Array:
    slots, _ = xj.map_slots(position, block_table, page_size=PAGE_SIZE)
    return slots.reshape(-1)


# A donated cache is updated in place: XLA returns its memory as the new cache.
@partial(jax.jit, static_argnames="count", donate_argnums=(0, 1))
def fill(
    mla_cache: jax.Array, indexer_cache: jax.Array, block_table: jax.Array, first: int, key: jax.Array, count: int
):
    """The caches with keys of `count` tokens of every request, from position `first`."""
    slots = map_positions(jnp.tile(first + jnp.arange(count, dtype=jnp.int32), (REQUESTS, 1)), block_table)
    latent, rope, index_k = jax.random.split(key, 3)
    mla_cache = xj.write_mla_cache(normal(latent, len(slots), 512), normal(rope, len(slots), 64), slots, mla_cache)
    return mla_cache, xj.write_indexer_cache(normal(index_k, len(slots), 128), slots, indexer_cache)


@partial(jax.jit, donate_argnums=(0, 1))
def step(mla_cache: jax.Array, indexer_cache: jax.Array, block_table: jax.Array, context: jax.Array, key: jax.Array):
    """Store the keys of NEXT_N new tokens of every request and attend with them; random ones stand for a model's."""
    traces.append(1)
    keys = jax.random.split(key, 6)
    position = jnp.tile(context + jnp.arange(NEXT_N, dtype=jnp.int32), (REQUESTS, 1))
    slots = map_positions(position, block_table)
    mla_cache = xj.write_mla_cache(normal(keys[0], TOKENS, 512), normal(keys[1], TOKENS, 64), slots, mla_cache)
    indexer_cache = xj.write_indexer_cache(normal(keys[2], TOKENS, 128), slots, indexer_cache)
    out, _, _ = xj.dsa_attention(
        normal(keys[3], TOKENS, HEADS, 576), normal(keys[4], TOKENS, INDEX_HEADS, 128),
        jax.random.normal(keys[5], (TOKENS, INDEX_HEADS)), mla_cache, indexer_cache, block_table,
        position.reshape(-1) + 1, k=K, softmax_scale=0.1352,
    )  # fmt: skip
    return out, mla_cache, indexer_cache


def main() -> None:
    key = jax.random.key(0)
    caches = [jnp.zeros((REQUESTS * PAGES, PAGE_SIZE, row), jnp.uint8) for row in (656, 132)]
    block_table = jax.random.permutation(key, REQUESTS * PAGES).astype(jnp.int32).reshape(REQUESTS, PAGES)
    for first in range(0, CONTEXT, PAGE_SIZE):
        key, new = jax.random.split(key)
        caches = fill(*caches, block_table, first, new, count=min(PAGE_SIZE, CONTEXT - first))

    out, *caches = step(*caches, block_table, jnp.int32(CONTEXT), key)  # traces and compiles
    out.block_until_ready()
    start = time.perf_counter()
    for index in range(STEPS):
        key, new = jax.random.split(key)
        out, *caches = step(*caches, block_table, jnp.int32(CONTEXT + NEXT_N * index), new)
    out.block_until_ready()
    seconds = time.perf_counter() - start
    assert len(traces) == 1 and bool(jnp.isfinite(out.astype(jnp.float32)).all())
    print(f"{STEPS * TOKENS / seconds:.0f} tokens/s of attention, {REQUESTS} requests of {CONTEXT} keys")


if __name__ == "__main__":
    main()
