"""Gradients of attention under shard_map, against those on one device; a script, since the devices are made first.

python jax_gradients.py 2      Prints a JSON line for each way to share the work out: its collectives.
"""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
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


def main(devices: int) -> None:
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
