"""Layers of Flax's two APIs, scanned over stacked weights and caches: each stores its keys and attends."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from stacked import LAYERS

from xmla import jax_api

TOKENS, WIDTH, HEADS, KEYS = 128, 256, 16, 128
LATENT, ROPE = 512, 64
CACHE = (7, 64, 656)
CALLS = 2 * LAYERS


def attend(
    x: jax.Array, slots: jax.Array, cache: jax.Array, project: Callable[..., jax.Array], *names: str
) -> tuple[jax.Array, jax.Array]:
    keys, query, output = names
    entries = project(keys, x)
    cache = jax_api.write_mla_cache(entries[:, :LATENT], entries[:, LATENT:], slots[:, 0], cache)
    queries = project(query, x).reshape(TOKENS, HEADS, LATENT + ROPE)
    out, _ = jax_api.sparse_mla(queries, cache, slots, softmax_scale=0.1)
    return x + project(output, out.reshape(TOKENS, -1)), cache


SIZES = {"keys": LATENT + ROPE, "query": HEADS * (LATENT + ROPE), "output": WIDTH}


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, slots: jax.Array) -> tuple[jax.Array, None]:
        cache = self.variable("caches", "cache", jnp.zeros, CACHE, jnp.uint8)
        dense = {name: linen.Dense(size, dtype=x.dtype, name=name) for name, size in SIZES.items()}
        x, cache.value = attend(x, slots, cache.value, lambda name, value: dense[name](value), *SIZES)
        return x, None


class NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        widths = {"keys": WIDTH, "query": WIDTH, "output": HEADS * LATENT}
        for name, size in SIZES.items():
            setattr(self, name, nnx.Linear(widths[name], size, dtype=jnp.bfloat16, rngs=rngs))
        self.cache = nnx.Cache(jnp.zeros(CACHE, jnp.uint8))

    def __call__(self, x: jax.Array, slots: jax.Array) -> jax.Array:
        x, self.cache[...] = attend(x, slots, self.cache[...], lambda name, value: getattr(self, name)(value), *SIZES)
        return x


INPUTS = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((TOKENS, KEYS), jnp.int32)


def linen_scan() -> tuple[Callable[..., Any], Any]:
    """A function of weights and inputs, and of caches; their shapes."""
    stack = linen.scan(
        LinenLayer, variable_axes={"params": 0, "caches": 0}, split_rngs={"params": True}, length=LAYERS,
        in_axes=linen.broadcast,
    )()  # fmt: skip
    variables = jax.eval_shape(stack.init, jax.random.key(0), *INPUTS)

    def function(read: Any, caches: Any) -> Any:
        weights, inputs = read
        return stack.apply({"params": weights, "caches": caches}, *inputs, mutable=["caches"])

    return function, ((variables["params"], INPUTS), variables["caches"])


def nnx_scan() -> tuple[Callable[..., Any], Any]:
    """A function of weights and inputs, and of caches; their shapes."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def stacked_layers(rngs: nnx.Rngs) -> NnxLayer:
        return NnxLayer(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
    def forward(layer: NnxLayer, x: jax.Array, slots: jax.Array) -> jax.Array:
        return layer(x, slots)

    stack, caches, weights = nnx.split(nnx.eval_shape(lambda: stacked_layers(nnx.Rngs(0))), nnx.Cache, ...)

    def function(read: Any, caches: Any) -> Any:
        weights, inputs = read
        layers = nnx.merge(stack, caches, weights)
        x = forward(layers, *inputs)
        return x, nnx.split(layers, nnx.Cache, ...)[1]

    return function, ((weights, INPUTS), caches)
