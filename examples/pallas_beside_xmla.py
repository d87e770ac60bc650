"""A Pallas kernel and xmla's kernels in one `jax.jit`: RMSNorm of the query, then sparse attention, then a scaling.

python examples/pallas_beside_xmla.py
"""

import os
from pathlib import Path

HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from xmla import jax_api as xmla

TOKENS, HEADS, LATENT, ROPE, K = 4, 16, 512, 64, 32


def rms_norm_kernel(x_ref, weight_ref, out_ref):
    """x [HEADS, L] of one token, normalised over L in float32."""
    x = x_ref[...].astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    out_ref[...] = (x * weight_ref[...]).astype(out_ref.dtype)


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    block = pl.BlockSpec((None, HEADS, LATENT), lambda token: (token, 0, 0))
    return pl.pallas_call(
        rms_norm_kernel,
        grid=(len(x),),
        in_specs=[block, pl.BlockSpec((LATENT,), lambda token: (0,))],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=not HAS_GPU,
    )(x, weight)


@jax.jit
def step(latent_q: jax.Array, rope_q: jax.Array, weight: jax.Array, cache: jax.Array, slots: jax.Array) -> jax.Array:
    q = jnp.concatenate([rms_norm(latent_q, weight), rope_q], axis=-1)
    out, _ = xmla.sparse_mla(q, cache, slots, softmax_scale=0.1352)
    return rms_norm(out, weight)


def main() -> None:
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    empty = jnp.zeros((2, 64, 656), jnp.uint8)
    every = jnp.arange(128, dtype=jnp.int32)
    cache = xmla.write_mla_cache(normal(128, LATENT), normal(128, ROPE), every, empty)
    slots = jax.random.permutation(next(keys), 128)[: TOKENS * K].reshape(TOKENS, K).astype(jnp.int32)
    out = step(normal(TOKENS, HEADS, LATENT), normal(TOKENS, HEADS, ROPE), jnp.ones(LATENT), cache, slots)
    square = jnp.mean(out.astype(jnp.float32) ** 2, axis=-1)
    print(f"out {out.shape} {out.dtype}, mean square {float(square.min()):.3f} to {float(square.max()):.3f}")


if __name__ == "__main__":
    main()
