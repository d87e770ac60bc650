"""The decoder: its modules have transformers' names, and all layers are one module of stacked weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xmla.core.errors import UnsupportedError


@dataclass(frozen=True)
class Config:
    """Sizes, by the names of transformers' DeepseekV32Config; the head dims are DeepSeek-V3.2's, all else is small."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.04
    dtype: Any = jnp.bfloat16

    @property
    def softmax_scale(self) -> float:
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

    @property
    def index_scale(self) -> float:
        return (self.index_n_heads * self.index_head_dim) ** -0.5


class Projected(NamedTuple):
    """What attention and indexer read of T tokens; the up-projection of the latent is in the query."""

    query: jax.Array  # [T, H, L+E]
    latent: jax.Array  # [T, L]
    k_rope: jax.Array  # [T, E]
    index_q: jax.Array  # [T, I, D]
    index_k: jax.Array  # [T, D]
    index_weights: jax.Array  # [T, I] f32, unscaled


Attend = Callable[[Projected], tuple[jax.Array, Any]]  # attention's out [T, H, L], and what else it leaves
Rope = tuple[jax.Array, jax.Array]  # cosines and sines [T, E/2]


def rope_angles(position: jax.Array, dims: int, theta: float) -> Rope:
    """cos and sin [T, dims / 2] of each pair's angle at `position` [T]."""
    frequency = theta ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    angle = position.astype(jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(first: jax.Array, second: jax.Array, rope: Rope) -> jax.Array:
    """The pairs (first, second) rotated, [T, …, dims / 2] each; all first halves stand before all second ones."""
    shape = (first.shape[0], *[1] * (first.ndim - 2), first.shape[-1])
    cos, sin = (each.reshape(shape).astype(first.dtype) for each in rope)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def linear(inputs: int, outputs: int, config: Config, rngs: nnx.Rngs) -> nnx.Linear:
    normal = nnx.initializers.normal(config.initializer_range)
    dtypes = {"param_dtype": config.dtype, "dtype": config.dtype}
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=normal, rngs=rngs, **dtypes)


def norm(features: int, config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(features, epsilon=config.rms_norm_eps, param_dtype=config.dtype, dtype=config.dtype, rngs=rngs)


def up(dims: int, config: Config, rngs: nnx.Rngs) -> nnx.Param:
    """An up-projection of the latent to so many dims of each head: [H, dims, L]."""
    shape = config.num_attention_heads, dims, config.kv_lora_rank
    return nnx.Param(nnx.initializers.normal(config.initializer_range)(rngs.params(), shape, config.dtype))


class Indexer(nnx.Module):
    """Queries, keys and head weights of the lightning indexer."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.wq_b = linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim, config, rngs)
        self.wk = linear(config.hidden_size, config.index_head_dim, config, rngs)
        self.k_norm = nnx.LayerNorm(
            config.index_head_dim, epsilon=1e-6, param_dtype=config.dtype, dtype=config.dtype, rngs=rngs
        )
        self.weights_proj = linear(config.hidden_size, config.index_n_heads, config, rngs)

    def __call__(self, x: jax.Array, q_resid: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = self.wq_b(q_resid).reshape(len(x), self.config.index_n_heads, -1)
        k = self.k_norm(self.wk(x))
        return self.roped(q, rope), self.roped(k, rope), self.weights_proj(x).astype(jnp.float32)

    def roped(self, v: jax.Array, rope: Rope) -> jax.Array:
        """The first dims rotated, in pairs of halves, unlike the main attention's."""
        dims = self.config.qk_rope_head_dim
        first, second, rest = jnp.split(v, [dims // 2, dims], axis=-1)
        return jnp.concatenate([rotate(first, second, rope), rest], axis=-1)


class SparseAttention(nnx.Module):
    """The projections of multi-head latent attention, and its indexer."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.config = config
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, config, rngs)
        self.q_a_layernorm = norm(config.q_lora_rank, config, rngs)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope), config, rngs)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + rope, config, rngs)
        self.kv_a_layernorm = norm(config.kv_lora_rank, config, rngs)
        # kv_b_proj, as its two halves: attention in the latent's dims multiplies by each alone
        self.up_key = up(config.qk_nope_head_dim, config, rngs)
        self.up_value = up(config.v_head_dim, config, rngs)
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size, config, rngs)
        self.indexer = Indexer(config, rngs)

    def project(self, x: jax.Array, position: jax.Array) -> Projected:
        """What attention reads of tokens x [T, hidden] at `position` [T]; only its own loss moves the indexer."""
        config = self.config
        rope = rope_angles(position, config.qk_rope_head_dim, config.rope_theta)
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).reshape(len(x), config.num_attention_heads, -1)
        q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [config.kv_lora_rank], axis=-1)
        q_rope, k_rope = (rotate(v[..., ::2], v[..., 1::2], rope) for v in (q_rope, k_rope))
        absorbed = jnp.einsum("thn,hnl->thl", q_nope, self.up_key[...])
        indexer = self.indexer(*jax.lax.stop_gradient((x, q_resid)), rope)
        return Projected(jnp.concatenate([absorbed, q_rope], axis=-1), self.kv_a_layernorm(latent), k_rope, *indexer)

    def project_back(self, out: jax.Array) -> jax.Array:
        """Attention's out [T, H, L] as hidden states [T, hidden]."""
        values = jnp.einsum("thl,hvl->thv", out.astype(self.config.dtype), self.up_value[...])
        return self.o_proj(values.reshape(len(out), -1))


class MLP(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.gate_proj = linear(config.hidden_size, config.intermediate_size, config, rngs)
        self.up_proj = linear(config.hidden_size, config.intermediate_size, config, rngs)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.input_layernorm = norm(config.hidden_size, config, rngs)
        self.self_attn = SparseAttention(config, rngs)
        self.post_attention_layernorm = norm(config.hidden_size, config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array, position: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        """Hidden states [T, hidden] after the layer, and what `attend` leaves beside attention's out."""
        out, rest = attend(self.self_attn.project(self.input_layernorm(x), position))
        x = x + self.self_attn.project_back(out)
        return x + self.mlp(self.post_attention_layernorm(x)), rest


class Model(nnx.Module):
    """DeepSeek-V3.2's decoder with a dense MLP in every layer and RoPE as it was first trained, without YaRN."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        dtypes = {"param_dtype": config.dtype, "dtype": config.dtype}
        normal = nnx.initializers.normal(config.initializer_range)
        self.config = config
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, embedding_init=normal, rngs=rngs, **dtypes)
        keys = jax.random.split(rngs.params(), config.num_hidden_layers)
        self.layers = nnx.vmap(lambda key: Layer(config, nnx.Rngs(key)))(keys)  # every weight is [layers, …]
        self.norm = norm(config.hidden_size, config, rngs)
        self.lm_head = linear(config.hidden_size, config.vocab_size, config, rngs)

    def __call__(
        self, tokens: jax.Array, position: jax.Array, attend: Callable[..., tuple[jax.Array, Any]],
        state: Any = (), of_layers: Any = None,
    ) -> tuple[jax.Array, Any, Any]:  # fmt: skip
        """Hidden states [T, hidden] of tokens [T], the state after the last layer, and what each layer leaves.

        `attend(state, part, projected)` gives attention's out and (state, leaves): `state` goes from layer to layer,
        `part` is the layer's of `of_layers` [layers, …].
        """

        def through(carry: tuple[jax.Array, Any], layer_and_part: tuple[Layer, Any]) -> tuple[Any, Any]:
            (x, state), (layer, part) = carry, layer_and_part
            x, (state, leaves) = layer(x, position, partial(attend, state, part))
            return (x, state), leaves

        start = self.embed_tokens(tokens), state
        (x, state), leaves = jax.lax.scan(through, start, (self.layers, of_layers))
        return self.norm(x), state, leaves

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits [T, vocabulary] in float32 of hidden states [T, hidden]."""
        return self.lm_head(x).astype(jnp.float32)


def names(path: Sequence[Any], layers: int) -> list[str]:
    """transformers' names of a parameter, one for each layer if it is one of the layers'."""
    *modules, leaf = map(str, path)
    of_layers = modules[:1] == ["layers"]
    words = [*modules[of_layers:], "weight" if leaf in ("kernel", "scale", "embedding") else leaf]
    if words[0] != "lm_head":
        words = ["model", *(["layers", "{}"] if of_layers else []), *words]
    return [".".join(words).format(layer) for layer in range(layers if of_layers else 1)]


def halves(weights: Mapping[str, np.ndarray], config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """The two up-projections in each layer's kv_b_proj."""
    for layer in range(config.num_hidden_layers):
        module = f"model.layers.{layer}.self_attn"
        both = weights[f"{module}.kv_b_proj.weight"].reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        yield f"{module}.up_key", both[:, : config.qk_nope_head_dim]
        yield f"{module}.up_value", both[:, config.qk_nope_head_dim :]


def load(settings: Mapping[str, Any], weights: Mapping[str, np.ndarray], **changes: Any) -> Model:
    """A model with the weights of transformers' `DeepseekV32ForCausalLM`, by its names.

    Args:
        settings: Its config: `config.to_dict()`, or the checkpoint's config.json.
        weights: Its `state_dict()` as arrays of NumPy; linear layers are [outputs, inputs] there.
        changes: Fields of `Config` that shall be others, such as `dtype`.

    Raises:
        UnsupportedError: Some layers have experts, or the rotation is scaled.
    """
    dense, layers = settings["first_k_dense_replace"], settings["num_hidden_layers"]
    if dense < layers:
        raise UnsupportedError(
            f"load: first_k_dense_replace is {dense} of {layers} layers, supported is a dense MLP in every layer"
        )
    rope = settings["rope_parameters"]
    if rope["rope_type"] != "default":
        raise UnsupportedError(f"load: rope_type is {rope['rope_type']}, supported is default")
    known = {**settings, "rope_theta": rope["rope_theta"], "dtype": Config.dtype, **changes}
    config = Config(**{field.name: known[field.name] for field in fields(Config)})
    weights = {**weights, **dict(halves(weights, config))}
    model = nnx.eval_shape(lambda: Model(config, nnx.Rngs(0)))  # without weights
    for path, parameter in nnx.iter_graph(model):
        if isinstance(parameter, nnx.Param):
            each = [weights[name] for name in names(path, layers)]
            each = [value.T if path[-1] == "kernel" else value for value in each]
            # a copy: JAX may share the memory of weights that are trained on elsewhere
            parameter.set_value(jnp.array(np.stack(each) if path[0] == "layers" else each[0], config.dtype))
    return model
