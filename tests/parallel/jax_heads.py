"""Decode steps of a layer whose heads devices share, by a `shard_map` that checks what is the same on all of them.

python jax_heads.py WAY      WAY is step or attention: dsa_step, or both writes and dsa_attention. The caches, which
                             every device has whole, are the carry of a scan; so are the tokens.
"""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xmla import jax_api

PAGE, HEADS, STEPS = 4, 6, 3
Caches = tuple[jax.Array, jax.Array]


def attend(way: str, caches: Caches, x: jax.Array, q: jax.Array, table: jax.Array, position: jax.Array) -> Any:
    """Results of one token of each request, x [T, 512 + 64 + 128 + 2 · 128 + 2], and the caches."""
    new = jnp.split(x, [512, 576, 704], 1)[:3]
    index_q, weights = x[:, 704:960].reshape(-1, 2, 128), x[:, 960:]
    slots = jax_api.map_slots(position[:, None], table, page_size=PAGE)[0][:, 0]
    given = {"k": 2, "softmax_scale": 0.06, "batch_invariant": True}
    if way == "step":
        out, _, indices, *caches = jax_api.dsa_step(
            *new, slots, q, index_q, weights, *caches, table, position + 1, **given
        )
        return out, indices, tuple(caches)
    caches = (
        jax_api.write_mla_cache(*new[:2], slots, caches[0]),
        jax_api.write_indexer_cache(new[2], slots, caches[1]),
    )
    out, _, indices = jax_api.dsa_attention(q, index_q, weights, *caches, table, position + 1, **given)
    return out, indices, caches


def decode(way: str, axis: str | None, caches: Caches, x: jax.Array, q: jax.Array, table: jax.Array) -> Any:
    def step(carry: Any, number: jax.Array) -> Any:
        caches, x = carry
        out, indices, caches = attend(way, caches, x, q, table, jnp.full(len(x), number, jnp.int32))
        out = out.astype(jnp.float32).max((1, 2))  # of all heads, so that both sum up alike
        x += (jax.lax.pmax(out, axis) if axis else out)[:, None].astype(x.dtype)
        return (caches, x), indices

    return jax.lax.scan(step, (caches, x), jnp.arange(STEPS, dtype=jnp.int32))


def main(way: str) -> None:
    rng = np.random.default_rng(0)
    caches = jnp.zeros((4, PAGE, 656), jnp.uint8), jnp.zeros((4, PAGE, 132), jnp.uint8)
    x = jnp.asarray(rng.standard_normal((2, 962)), jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((2, HEADS, 576)), jnp.bfloat16)
    table = jnp.asarray([[2, 0], [1, 3]], jnp.int32)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = P(), P(), P(None, "heads"), P()
    shared = jax.shard_map(partial(decode, way, "heads"), mesh=mesh, in_specs=specs, out_specs=P())
    got, want = jax.jit(shared)(caches, x, q, table), jax.jit(partial(decode, way, None))(caches, x, q, table)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(theirs, np.float32))
    (written, _), indices = got
    assert all(bool(cache.any()) for cache in written)
    assert indices.shape == (STEPS, 2, 2)
    assert int(indices.max()) > 0


if __name__ == "__main__":
    main(sys.argv[1])
