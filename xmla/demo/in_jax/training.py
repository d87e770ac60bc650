"""Training over texts: attention and the indexer's loss by xmla's differentiable ops, the optimiser by optax.

As in the model's technical report: first the indexers alone, with every key attended to; then everything, over the
selected keys. An indexer learns from its own loss alone, on detached inputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from xmla import jax_api as xj
from xmla.demo import curves
from xmla.demo.curves import Curve, Sizes, Stage, Train, texts_of
from xmla.demo.in_jax import dense
from xmla.demo.in_jax.dense import Leaves
from xmla.demo.in_jax.model import Config, Model, Projected, names

TITLE = "DeepSeek-V3.2 in Flax NNX, trained by xmla"
STORY = {
    "model": "DeepSeek-V3.2 in Flax NNX: two layers, in a scan, with its own head dims (latent 512, rope 64, indexer "
    "128) and little else, random weights in float32 with sharp attention",
    "by xmla": "sparse_mla, indexer_scores, select_topk and indexer_loss over bfloat16 rows, and their derivatives",
    "beside it": "the same model over all pairs of tokens in jax.numpy (attention over the keys that xmla selected), "
    "in float32, and with products in bfloat16",
}
RUNS = ("xmla", "dense", "dense in bfloat16")
COMMAND = "xmla demo --framework jax --train"
# By default XLA adds the gradients of an embedding's rows by atomics, in any order: a second run would have other bits.
IN_ONE_ORDER = {"xla_gpu_deterministic_ops": True}


def attend(
    config: Config, texts: int, every: bool, state: Any, selected: jax.Array | None, p: Projected
) -> tuple[jax.Array, tuple[Any, Leaves]]:
    """Attention over plain rows: of all keys of a token's text, of those that the indexer selects, or of a rollout's.

    These are `selected` [N, K], counted from the text's first key, as `dsa_step` gives them.
    """
    place = jnp.arange(len(p.latent), dtype=jnp.int32)
    tokens = len(place) // texts
    starts, ends = place // tokens * tokens, place + 1  # the keys of a token's own text, up to itself
    query, rows = (v.astype(jnp.bfloat16) for v in (p.query, jnp.concatenate([p.latent, p.k_rope], axis=-1)))
    indexer = p.index_q.astype(jnp.bfloat16), p.index_k.astype(jnp.bfloat16), p.index_weights * config.index_scale

    if selected is None:
        scores = xj.indexer_scores(*jax.lax.stop_gradient(indexer), ends, starts)
        selected = xj.select_topk(scores, ends, starts, k=config.index_topk)
    keys = jnp.broadcast_to(place[:tokens], (len(place), tokens)) if every else selected
    slots = keys + starts[:, None]
    slots = jnp.where((keys >= 0) & (slots < ends[:, None]), slots, -1)
    out, lse = xj.sparse_mla(query, rows[:, None], slots, softmax_scale=config.softmax_scale)
    constants = jax.lax.stop_gradient((query, rows, lse))
    loss = xj.indexer_loss(
        *indexer, *constants, ends, starts, None if every else slots, softmax_scale=config.softmax_scale
    )
    q, rows = (v.reshape(texts, tokens, *v.shape[1:]).astype(jnp.float32) for v in constants[:2])
    logits = jnp.einsum("bthe,bse->bhts", q, rows) * config.softmax_scale
    leaves = Leaves(loss[0][0], selected, dense.overlap(selected.reshape(texts, tokens, -1), logits))
    return out, (state, leaves)


def loss_of(model: Model, batch: jax.Array, attend: Any, selected: Any = None) -> tuple[jax.Array, tuple[Any, Leaves]]:
    """Cross-entropy and the indexers' loss of texts [B, T+1], then the first alone and each layer's leaves."""
    tokens = batch[:, :-1]
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape).reshape(-1)
    x, _, leaves = model(tokens.reshape(-1), position, attend, (), selected)
    loss = optax.softmax_cross_entropy_with_integer_labels(model.logits(x), batch[:, 1:].reshape(-1)).mean()
    return loss + leaves.kl.mean(), (loss, leaves)


@jax.default_matmul_precision("float32")  # on a GPU it would be TF32
def train(
    model: Model, stage: Stage, steps: int, *, batch: np.ndarray, over: Curve | None = None, half: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Curve:  # fmt: skip
    """Train the model on texts [B, T+1] of tokens: by xmla, or densely `over` the keys that xmla selected.

    While the stage is dense the indexers learn alone. `half` is with products of attention in bfloat16.
    """
    config, texts = model.config, len(batch)
    learned = nnx.All(nnx.Param, nnx.PathContains("indexer")) if stage.dense else nnx.Param
    optimizer = nnx.Optimizer(model, optax.adamw(stage.rate, weight_decay=0.01), wrt=learned)
    attention = partial(attend, config, texts, stage.dense)
    if over is not None:
        attention = partial(dense.attend, config, texts, stage.dense, jnp.bfloat16 if half else jnp.float32)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, batch: jax.Array, selected: Any) -> Any:
        loss = partial(loss_of, batch=batch, attend=attention, selected=selected)
        gradients, parts = nnx.grad(loss, argnums=nnx.DiffState(0, learned), has_aux=True)(model)
        optimizer.update(model, gradients)
        return parts, gradients

    def arguments(place: int) -> tuple[Any, ...]:
        return model, optimizer, tokens, None if over is None else jnp.asarray(np.stack(over.selected[place]))

    curve, tokens = Curve(), jnp.asarray(batch)
    compiled = step.lower(*arguments(0)).compile(IN_ONE_ORDER)
    for place in range(steps):
        (loss, leaves), gradients = compiled(*arguments(place))
        if place == 0:
            curve.gradients = dict(by_name(gradients, config.num_hidden_layers))
        curve.loss.append(float(loss))
        curve.kl.append(float(leaves.kl.mean()))
        curve.overlap.append(float(leaves.overlap.mean()))
        curve.selected.append([*np.asarray(leaves.selected)])
        advance()
    return curve


def by_name(gradients: nnx.State, layers: int) -> Any:
    """Each parameter's gradient by transformers' name, shaped as it is there."""
    for path, gradient in nnx.to_flat_state(gradients):
        value = np.asarray(gradient[...])
        value = value.swapaxes(-1, -2) if path[-1] == "kernel" else value
        of_names = names(path, layers)
        yield from zip(of_names, value if path[0] == "layers" else [value], strict=True)


def prepare() -> tuple[Sizes, Model, Train]:
    """Sizes for this machine, the model with queries four times as large, and what trains it on the sizes' texts.

    Attention of a random model is nearly flat, unlike a trained one's, and would give an indexer nothing to learn.
    """
    sizes = curves.SIZES["cuda" if jax.default_backend() == "gpu" else "cpu"]
    model = Model(Config(index_topk=sizes.topk, dtype=jnp.float32), nnx.Rngs(0))
    queries = model.layers.self_attn.q_b_proj.kernel
    queries.set_value(4 * queries[...])
    return sizes, model, partial(train, batch=texts_of(sizes))
