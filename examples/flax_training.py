"""A model of Flax NNX layers, trained on xmla in JAX as `xmla demo --train` trains transformers' in torch.

python examples/flax_training.py [picture.png]

It gets the weights of the demo's model. The indexer's warm-up comes first, then joint training over the selected keys.
It keeps the bounds of `xmla demo --train` for gradients, curves and selection, beside the model as shipped. Its curves
are drawn beside that model's and those of xmla in torch.
"""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

from flax_dsa_layer import GPU, Config, SparseAttention, load, name_of  # isort: skip  # first: it chooses the interpreter

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console

from xmla import jax_api as xj
from xmla.demo.shell import table_of
from xmla.demo.trained import JOINT, WARM_UP, Curve, Stage, build_sharp, train
from xmla.demo.training import Sizes, against_shipped, texts_of
from xmla.interop import to_torch

# Rounding grows along joint training: over 20 steps it moves the loss a hundredth as far as a gradient of the rows does
# that is a tenth too large, over 120 half as far, and the curve says little more.
SIZES = (
    Sizes(texts=4, tokens=64, topk=12, steps={WARM_UP: 60, JOINT: 20})
    if GPU
    else Sizes(texts=2, tokens=8, topk=3, steps={WARM_UP: 2, JOINT: 2})
)
DEVICE = "cuda" if GPU else "cpu"
CONFIG = Config(index_topk=SIZES.topk, dtype=jnp.float32)


class MLP(nnx.Module):
    def __init__(self, hidden: int, inner: int, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, inner),
            linear(hidden, inner),
            linear(inner, hidden),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Its modules have transformers' names."""

    def __init__(self, config: Config, inner: int, rngs: nnx.Rngs) -> None:
        norm = partial(nnx.RMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = SparseAttention(config, rngs)
        self.mlp = MLP(config.hidden_size, inner, rngs)

    def __call__(self, x: jax.Array, stage: Stage) -> tuple[jax.Array, jax.Array, jax.Array]:
        attended, kl, selected = attend(self.self_attn, self.input_layernorm(x), stage)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kl, selected


class Model(nnx.Module):
    def __init__(self, config: Config, layers: int, vocabulary: int, inner: int, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(vocabulary, config.hidden_size, rngs=rngs)
        self.layers = nnx.List(Layer(config, inner, rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.lm_head = nnx.Linear(config.hidden_size, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array, stage: Stage) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Logits [B · T, vocabulary], the mean of the indexers' losses and each layer's keys, of texts [B, T]."""
        x, losses, selected = self.embed_tokens(tokens.reshape(-1)), [], []
        for layer in self.layers:
            x, kl, keys = layer(x, stage)
            losses.append(kl)
            selected.append(keys)
        return self.lm_head(self.norm(x)), jnp.stack(losses).mean(), selected


def attend(layer: SparseAttention, x: jax.Array, stage: Stage) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention over plain rows of tokens x [B · T, hidden], the loss from which the indexer alone learns, its keys."""
    place = jnp.arange(len(x), dtype=jnp.int32)
    position = place % SIZES.tokens
    starts, ends = place - position, place + 1
    query, latent, k_rope, q_resid = layer.project(x, position)
    query, rows = query.astype(jnp.bfloat16), jnp.concatenate([latent, k_rope], axis=-1).astype(jnp.bfloat16)
    index_q, index_k, weights = layer.index(*jax.lax.stop_gradient((x, q_resid)), position)
    weights = weights * (layer.config.index_n_heads * layer.config.index_head_dim) ** -0.5
    indexer = index_q.astype(jnp.bfloat16), index_k.astype(jnp.bfloat16), weights

    scores = xj.indexer_scores(*jax.lax.stop_gradient(indexer), ends, starts)
    selected = xj.select_topk(scores, ends, starts, k=layer.config.index_topk)
    keys = jnp.broadcast_to(place[: SIZES.tokens], (len(x), SIZES.tokens)) if stage.dense else selected
    slots = keys + starts[:, None]
    slots = jnp.where((keys >= 0) & (slots < ends[:, None]), slots, -1)
    out, lse = xj.sparse_mla(query, rows[:, None], slots, softmax_scale=layer.softmax_scale)
    constants = jax.lax.stop_gradient((query, rows, lse))
    kl, *_ = xj.indexer_loss(
        *indexer, *constants, ends, starts, None if stage.dense else slots, softmax_scale=layer.softmax_scale
    )
    return layer.project_back(out.astype(x.dtype)), kl[0], selected


@jax.default_matmul_precision("float32")  # on a GPU it would be TF32
def train_flax(model: Model, stage: Stage, batch: jax.Array, steps: int) -> Curve:
    """Train the indexers alone while the stage is dense, then everything."""
    learned = nnx.All(nnx.Param, nnx.PathContains("indexer")) if stage.dense else nnx.Param
    optimizer = nnx.Optimizer(model, optax.adamw(stage.rate, weight_decay=0.01), wrt=learned)

    def loss_of(model: Model) -> tuple[jax.Array, tuple[jax.Array, jax.Array, list[jax.Array]]]:
        logits, kl, selected = model(batch[:, :-1], stage)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:].reshape(-1)).mean()
        return loss + kl, (loss, kl, selected)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer) -> tuple[Any, nnx.State]:
        gradients, told = nnx.grad(loss_of, argnums=nnx.DiffState(0, learned), has_aux=True)(model)
        optimizer.update(model, gradients)
        return told, gradients

    curve = Curve(overlap=[math.nan] * steps)
    for place in range(steps):
        (loss, kl, selected), gradients = step(model, optimizer)
        if place == 0:
            for path, gradient in nnx.to_flat_state(gradients):
                name, value = name_of(path), to_torch(gradient[...])
                name = name if name.startswith("lm_head.") else f"model.{name}"
                curve.gradients[name] = value.T if path[-1] == "kernel" else value
        curve.loss.append(float(loss))
        curve.kl.append(float(kl))
        curve.selected.append([to_torch(keys) for keys in selected])
    return curve


def main() -> None:
    by_torch, shipped, rounded = (build_sharp(DEVICE, SIZES.topk) for _ in range(3))
    config: Any = shipped.config
    sizes = config.num_hidden_layers, config.vocab_size, config.intermediate_size
    model = nnx.eval_shape(lambda: Model(CONFIG, *sizes, nnx.Rngs(0)))  # without weights, which are loaded
    weights = shipped.state_dict().items()
    load(model, {name.removeprefix("model."): value.cpu().numpy() for name, value in weights})
    batch = texts_of(SIZES, DEVICE)
    runs: dict[str, dict[Stage, Curve]] = {"xmla in torch": {}, "xmla in JAX": {}, "as shipped": {}}
    figures = []
    for stage, steps in SIZES.steps.items():
        runs["xmla in torch"][stage] = train(by_torch, stage, batch, steps)
        found = runs["xmla in JAX"][stage] = train_flax(model, stage, jnp.asarray(batch.cpu().numpy()), steps)
        # Two trainings that each select their own keys part at the first that all but tie, and no rounding tells how
        # far: so the model as shipped attends to JAX's keys, not to torch's, and what is left is rounding.
        want = runs["as shipped"][stage] = train(shipped, stage, batch, steps, over=found)
        autocast = train(rounded, stage, batch, steps, over=found, half=True)
        what = "kl" if stage.dense else "loss"  # what the stage minimises
        first, last, ours = getattr(want, what)[0], getattr(want, what)[-1], getattr(found, what)[-1]
        print(f"out ({steps},) {what} in the {stage.name}: {first:.4f} to {last:.4f} as shipped, {ours:.4f} in JAX")
        figures += against_shipped(stage, SIZES.tokens, found, want, autocast)
    Console().print(table_of("xmla in JAX beside the model as shipped", figures))
    assert all(figure["ok"] for figure in figures)
    if sys.argv[1:]:
        from xmla.demo.picture import draw

        draw("A model of Flax NNX layers, trained by xmla", runs, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
