"""Programs of every kind run through JAX's launcher, above a driver that makes no launches, on four CPU devices.

    JAX_PLATFORMS=cpu python tests/parallel/jax_launcher.py LIBRARY
LIBRARY is tests/shared/launcher_on_host.cc, compiled. What is told here is that XLA takes the programs and
copies no cache, not what they compute.
"""

import os

if __name__ == "__main__":
    os.environ["JAX_NUM_CPU_DEVICES"] = "4"

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from noting import Noting

from xmla import jax_api
from xmla.core.values import H100, assume_device
from xmla.jax_api import _launcher, _primitive

TOKENS, HEADS, K, LAYERS = 8, 64, 128, 2


def attend(q: jax.Array, cache: jax.Array, slots: jax.Array) -> jax.Array:
    return jax_api.sparse_mla(q, cache, slots, softmax_scale=0.1)[0]


def write(cache: jax.Array, latent: jax.Array, rope: jax.Array, slots: jax.Array) -> jax.Array:
    return jax_api.write_mla_cache(latent, rope, slots, cache)


def attend_in_turn(q: jax.Array, cache: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Layers in a scan: a layer's output is stacked, and is also what the next one adds to its query."""

    def layer(before: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(q + before[..., :1], cache, slots)
        return out, out

    return jax.lax.scan(layer, jnp.zeros((TOKENS, HEADS, 512), q.dtype), jnp.arange(3))


Caches = list[jax.Array]


def two_layers(caches: Caches, keys: Caches, q: jax.Array, slots: jax.Array) -> tuple[jax.Array, Caches]:
    """A cache a layer: each stores its keys, then attends."""
    for layer, cache in enumerate(caches):
        caches[layer] = write(cache, *keys, slots[:, 0])
        q = q + attend(q, caches[layer], slots)[..., :1]
    return q, caches


def stacked_layers(cache: jax.Array, keys: Caches, q: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One cache [L * P, R, ROW] in a scan over layers, whose pages follow one another."""
    entries = cache.shape[0] // LAYERS * cache.shape[1]

    def layer(carry: tuple[jax.Array, jax.Array], first: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        q, cache = carry
        cache = write(cache, *keys, slots[:, 0] + first)
        return (q + attend(q, cache, slots + first)[..., :1], cache), None

    (q, cache), _ = jax.lax.scan(layer, (q, cache), jnp.arange(LAYERS, dtype=jnp.int32) * entries)
    return q, cache


def copies_of_pools(function: Callable[..., object], *arguments: object, donated: int | None = 0) -> int:
    """Copies of a cache in what XLA compiles of a function, one argument of which is donated."""
    text = jax.jit(function, donate_argnums=donated).lower(*arguments).compile().as_text() or ""
    assert _launcher.TARGET in text
    return sum(" copy(" in line and "u8[" in line for line in text.splitlines())


def main() -> None:
    noting = Noting(sys.argv[1])
    _launcher.library = lambda: noting.library
    _launcher.compiled = noting.compiled
    _primitive.lowered_for = lambda *_: H100
    mesh = Mesh(np.array(jax.devices()).reshape(4), ("x",))
    sharded, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    q, slots = jnp.zeros((TOKENS, HEADS, 576), jnp.bfloat16), jnp.zeros((TOKENS, K), jnp.int32)
    rows, cache = jnp.zeros((K, 1, 576), jnp.bfloat16), jnp.zeros((4, 64, 656), jnp.uint8)
    entries = jnp.zeros((TOKENS, 512), jnp.bfloat16), jnp.zeros((TOKENS, 64), jnp.bfloat16), slots[:, 0]
    on_mesh = jax.device_put(q, sharded), jax.device_put(cache, whole), jax.device_put(slots, sharded)

    for name, function, arguments in (
        ("one device", jax.jit(attend), (q, cache, slots)),
        ("scan", jax.jit(attend_in_turn), (q, cache, slots)),
        ("gradient", jax.jit(jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum())), (q, rows, slots)),
        ("vmap", jax.jit(jax.vmap(attend, (0, None, 0))), (q[None], cache, slots[None])),
        ("write", jax.jit(write), (cache, *entries)),
        ("write over devices", jax.jit(write), (on_mesh[1], *entries)),
        ("sharded tokens", jax.jit(attend), on_mesh),
        ("shard_map", jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))),
         on_mesh),
    ):  # fmt: skip
        if name != "sharded tokens":  # whose call is in a part that XLA partitions
            assert _launcher.TARGET in function.lower(*arguments).as_text(), name
        found = jax.block_until_ready(function(*arguments))
        assert name != "sharded tokens" or found.sharding == sharded, found.sharding
        assert noting.launches(), name
        print(name)
    keys = [*entries[:2]]
    assert copies_of_pools(two_layers, [cache, cache + 1], keys, q, slots) == 0
    assert copies_of_pools(stacked_layers, jnp.concatenate([cache, cache]), keys, q, slots) == 0
    assert copies_of_pools(write, cache, *entries, donated=None) == 1
    unused = jax.jit(lambda q: (attend(q, cache, slots), q + 1)[1]).lower(q).as_text()
    assert _launcher.TARGET not in unused


if __name__ == "__main__":
    with assume_device(H100):
        main()
