"""The step of decode_torch.py in JAX, with caches as arrays and as Refs, under `jit`. Runs anywhere.

python examples/decode_jax.py
"""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from xmla import jax_api as xj

requests, heads, index_heads, context, page_size = 2, 16, 8, 200, 64
pages = -(-context // page_size)
tokens = requests * context


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


block_table = jax.random.permutation(jax.random.key(0), requests * pages).astype(jnp.int32).reshape(requests, pages)
positions = jnp.tile(jnp.arange(context, dtype=jnp.int32), (requests, 1))
slots = xj.map_slots(positions, block_table, page_size=page_size)[0].reshape(-1)
mla_pool = jnp.zeros((requests * pages, page_size, 656), jnp.uint8)
indexer_pool = jnp.zeros((requests * pages, page_size, 132), jnp.uint8)
keys = normal(1, tokens, 512), normal(2, tokens, 64), normal(3, tokens, 128)
query = normal(4, requests, heads, 576), normal(5, requests, index_heads, 128), normal(6, requests, index_heads)


def attend(mla_cache: jax.Array | jax.Ref, indexer_cache: jax.Array | jax.Ref, query: tuple[jax.Array, ...]):
    q, index_q, index_weights = query
    lengths = jnp.full(requests, context, jnp.int32)
    return xj.dsa_attention(
        q, index_q, index_weights, mla_cache, indexer_cache, block_table, lengths, k=64, softmax_scale=0.1352
    )


# Arrays do not change: a write RETURNS the new cache. Donation lets XLA update the old one's memory.
@jax.jit(donate_argnums=(0, 1))
def step(mla_cache: jax.Array, indexer_cache: jax.Array, keys: tuple[jax.Array, ...], query: tuple[jax.Array, ...]):
    latent, rope, index_k = keys
    mla_cache = xj.write_mla_cache(latent, rope, slots, mla_cache)  # without `mla_cache =` nothing is written
    indexer_cache = xj.write_indexer_cache(index_k, slots, indexer_cache)
    out, _, indices = attend(mla_cache, indexer_cache, query)
    return mla_cache, indexer_cache, out, indices


# Refs change in place, as torch tensors do: a write returns None.
@jax.jit
def step_in_place(mla_ref: jax.Ref, indexer_ref: jax.Ref, keys: tuple[jax.Array, ...], query: tuple[jax.Array, ...]):
    latent, rope, index_k = keys
    xj.write_mla_cache(latent, rope, slots, mla_ref)
    xj.write_indexer_cache(index_k, slots, indexer_ref)
    return attend(mla_ref, indexer_ref, query)[0]


mla_ref, indexer_ref = jax.new_ref(mla_pool), jax.new_ref(indexer_pool)
in_place = step_in_place(mla_ref, indexer_ref, keys, query)

# The trap: the result of the write is dropped, so attention reads the empty cache, whose values are 0.
xj.write_mla_cache(keys[0], keys[1], slots, mla_pool)
assert not mla_pool.any()
assert not attend(mla_pool, indexer_ref, query)[0].any()

mla_cache, indexer_cache, out, indices = step(mla_pool, indexer_pool, keys, query)
assert (out == in_place).all() and (mla_cache == mla_ref[...]).all()
print(f"out {out.shape} {out.dtype}, first selected positions {indices[0, :6].tolist()}")
