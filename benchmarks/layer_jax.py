"""`python -m benchmarks.layer_jax TOKENS`: the dense training step of `benchmarks.layer` in JAX, as MaxText has it.

Scores of all pairs of tokens, a mask added to them, softmax in the scores' own dtype, and attention's distribution for
the indexer's loss by a second pass in float32: MaxText's defaults, with `indexer_sparse_training`. Prints a JSON line.
JAX keeps the memory that it has taken, so that every number of tokens has a process of its own.
"""

import json
import statistics
import time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import typer

from benchmarks.layer import ROUNDS, Layer, Sizes, difference

MASKED = -0.7 * float(np.finfo(np.float32).max)
EPSILON = 1e-8  # beside probabilities, in divisions and logarithms


def results(
    q: jax.Array, rows: jax.Array, index_q: jax.Array, index_k: jax.Array, index_weights: jax.Array, slots: jax.Array,
    sizes: Sizes,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:  # fmt: skip
    """Attention's output and the indexer's loss; and what the formulation's own selection ends at.

    As in PyTorch the keys are those that xmla selected, `slots` [T, K], although the formulation selects too.
    """
    count = len(q)
    products = jax.nn.relu(jnp.einsum("tid,sd->tsi", index_q, index_k))
    scores = jnp.einsum("tsi,ti->ts", products, index_weights)
    seen = jnp.where(jnp.tri(count, dtype=bool), jax.lax.stop_gradient(scores), MASKED)
    cutoff = jax.lax.top_k(seen, min(sizes.k, count))[0][:, -1]
    tokens = jnp.arange(count)[:, None]
    allowed = jnp.zeros((count, count + 1), bool).at[tokens, jnp.where(slots < 0, count, slots)].set(True)[:, :count]
    mask = jnp.where(allowed, 0, MASKED).astype(q.dtype)

    def logits(q: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.einsum("thd,sd->hts", q, rows) * sizes.scale + mask

    out = jnp.einsum("hts,sd->thd", jax.nn.softmax(logits(q, rows)), rows[:, :512])
    constant = logits(*jax.lax.stop_gradient((q, rows))).astype(jnp.float32)
    target = jax.nn.softmax(constant).sum(0)
    target /= target.sum(-1, keepdims=True) + EPSILON
    prediction = jax.nn.softmax(scores + mask)
    loss = (target * (jnp.log(target + EPSILON) - jnp.log(prediction + EPSILON))).sum(-1).mean()
    return (out, loss), cutoff


class Step:
    """A layer's arrays in JAX, copied, so that JAX counts them; a call is a step."""

    def __init__(self, layer: Layer, slots: torch.Tensor) -> None:
        def copied(tensor: torch.Tensor) -> jax.Array:
            return jnp.array(jax.dlpack.from_dlpack(tensor.detach()))

        self.leaves = {name: copied(leaf) for name, leaf in layer.leaves.items()}
        self.dout, self.slots = copied(layer.dout), copied(slots)

        @jax.jit
        def step(leaves: dict[str, jax.Array], dout: jax.Array, slots: jax.Array) -> Any:
            (out, loss), pull, cutoff = jax.vjp(
                lambda leaves: results(**leaves, slots=slots, sizes=layer.sizes), leaves, has_aux=True
            )
            (gradients,) = pull((dout.astype(out.dtype), jnp.ones_like(loss)))
            return {"loss": loss[None]} | gradients, cutoff

        self.step = step

    def __call__(self) -> dict[str, jax.Array]:
        gradients, _ = jax.block_until_ready(self.step(self.leaves, self.dout, self.slots))
        return gradients

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of a step by leaf, with its loss among them, as `Layer.gradients` has them."""
        return {name: torch.from_dlpack(value) for name, value in self().items()}


def measure(step: Step) -> dict[str, Any]:
    """Milliseconds of a step, and the most memory that JAX took."""
    times = []
    try:
        step()
        for _ in range(ROUNDS):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return {"out_of_memory": True}
        raise
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return {"ms": round(statistics.median(times), 2), "peak_gib": round(peak / 2**30, 2)}


def main(tokens: Annotated[int, typer.Argument(min=1, help="Of the step.")]) -> None:
    """Time the step, and compare its gradients with xmla's where it fits in memory."""
    torch.manual_seed(0)
    layer = Layer.random(Sizes(), tokens, "cuda")
    # In the host's memory: JAX keeps what a step takes of the GPU's.
    gradients = {name: value.cpu() for name, value in layer.gradients(layer.by_xmla).items()}
    step = Step(layer, layer.select())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    line = measure(step)
    if "ms" in line:
        apart = difference(gradients, {name: value.cpu() for name, value in step.gradients().items()})
        line["difference"] = {name: float(f"{d:.2e}") for name, d in apart.items()}
    print(json.dumps(line))


if __name__ == "__main__":
    typer.run(main)
