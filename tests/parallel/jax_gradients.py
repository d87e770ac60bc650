"""Gradients of attention and of the indexer's loss under shard_map, against those on one device; a script, since the
devices are made first.

python jax_gradients.py 2      Prints a JSON line for each way to share the work out: its collectives.
"""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"

import json
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xmla import jax_api

COLLECTIVES = re.compile(r"\b(all-gather|all-reduce|reduce-scatter)(?:-start)?\(")


def attend(q: jax.Array, kv: jax.Array, slots: jax.Array, sink: jax.Array) -> jax.Array:
    return jax_api.sparse_mla(q, kv, slots, None, sink, softmax_scale=0.06)[0]


def over_context(q: jax.Array, kv: jax.Array, slots: jax.Array, sink: jax.Array) -> jax.Array:
    """Each device has its tokens and its part of the keys."""
    return attend(q, jax.lax.all_gather(kv, "x", tiled=True), slots, sink)


# Of the indexer's loss: attention's queries, their lse and its rows, the indexer's queries, keys and weights, indices.
Loss = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def learn(*arrays: *Loss) -> jax.Array:
    q, lse, rows, *indexer, indices = arrays
    return jax_api.indexer_loss(*indexer, q, rows, lse, indices=indices, softmax_scale=0.06)[0]


def learn_over_heads(*arrays: *Loss) -> jax.Array:
    """Each device has its heads of attention; the indexer learns the sum of their probabilities."""
    q, lse, rows, *indexer, indices = arrays
    target = jax_api.indexer_target(q, rows, lse, indices, softmax_scale=0.06)
    return jax_api.indexer_loss(*indexer, indices=indices, target=jax.lax.psum(target, "x"))[0]


def learn_over_tokens(*arrays: *Loss) -> jax.Array:
    """Each device has its tokens: the loss is the mean of theirs."""
    return jax.lax.pmean(learn(*arrays), "x")


def check_attention(mesh: jax.sharding.Mesh) -> None:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((4, 6, 576)), jnp.bfloat16)
    kv = jnp.asarray(rng.standard_normal((8, 1, 576)), jnp.bfloat16)
    sink = jnp.asarray(rng.standard_normal(6), jnp.float32)
    slots = jnp.asarray(rng.integers(-1, 9, (4, 7)), jnp.int32)
    target = jnp.asarray(rng.standard_normal((4, 6, 512)), jnp.float32)

    def gradients(call: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
        def loss(q: jax.Array, kv: jax.Array, sink: jax.Array) -> jax.Array:
            return (call(q, kv, slots, sink).astype(jnp.float32) * target).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    want = gradients(attend)(q, kv, sink)
    tokens, heads, whole = P("x"), P(None, "x"), P()
    for name, call, specs, out in (
        ("tokens", attend, (tokens, whole, tokens, whole), tokens),
        ("heads", attend, (heads, whole, whole, P("x")), heads),
        ("context", over_context, (tokens, P("x"), tokens, whole), tokens),
    ):
        derived = gradients(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out))
        got = derived(q, kv, sink)
        assert bool(jnp.array_equal(got[0], want[0])), f"dq over {name}"
        for which, mine, theirs in zip(("dkv", "dsink"), got[1:], want[1:], strict=True):
            # Each device rounds its part, and the parts are added in bfloat16.
            np.testing.assert_allclose(
                np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=2**-6, atol=2**-6,
                err_msg=f"{which} over {name}",
            )  # fmt: skip
            assert np.asarray(theirs, np.float32).any()
        found = sorted(set(COLLECTIVES.findall(derived.lower(q, kv, sink).compile().as_text())))
        print(json.dumps({"over": name, "collectives": found}))


def check_loss(mesh: jax.sharding.Mesh) -> None:
    rng = np.random.default_rng(1)

    def normal(*shape: int, dtype: type = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    q, rows, lse = normal(4, 6, 64), normal(9, 64), normal(4, 6, dtype=jnp.float32)
    indexer = normal(4, 5, 32), normal(9, 32), normal(4, 5, dtype=jnp.float32)
    indices = jnp.asarray(rng.integers(-1, 10, (4, 7)), jnp.int32)

    def gradients(call: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
        def loss(*indexer: jax.Array) -> jax.Array:
            return call(q, lse, rows, *indexer, indices)[0]

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    want = gradients(learn)(*indexer)
    tokens, heads, whole = P("x"), P(None, "x"), P()
    for name, call, specs in (
        ("heads of the target", learn_over_heads, (heads, heads, *[whole] * 5)),
        ("tokens of the loss", learn_over_tokens, (tokens, tokens, whole, tokens, whole, tokens, tokens)),
    ):
        derived = gradients(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=whole))
        for which, mine, theirs in zip("qkw", derived(*indexer), want, strict=True):
            mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
            np.testing.assert_allclose(mine, theirs, rtol=2**-6, atol=2**-9, err_msg=f"d{which} over {name}")
            assert theirs.any()
        found = sorted(set(COLLECTIVES.findall(derived.lower(*indexer).compile().as_text())))
        print(json.dumps({"over": name, "collectives": found}))


def main(devices: int) -> None:
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    check_attention(mesh)
    check_loss(mesh)


if __name__ == "__main__":
    main(int(sys.argv[1]))
