"""A layer of DeepSeek sparse attention in Flax NNX: projections, rope, indexer, paged caches, xmla's ops.

python examples/flax_dsa_layer.py

Where transformers is installed the layer gets the weights of its `deepseek_v32` attention and is compared with it: a
prompt in one call, then a decode loop that was jitted once, over fp8 pages and over plain bfloat16 rows.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

GPU = Path("/dev/nvidiactl").exists()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xmla import jax_api as xj

PAGE_SIZE = 64


@dataclass(frozen=True)
class Config:
    """Sizes of a layer, by the names of transformers' DeepseekV32Config."""

    hidden_size: int = 256
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
    dtype: Any = jnp.bfloat16


@dataclass(frozen=True)
class Caches:
    """One layer's pools, updated in place, and who owns which page; `plain` pools hold bfloat16 rows."""

    mla: jax.Ref
    indexer: jax.Ref
    block_table: jax.Array  # [B, M] i32

    @classmethod
    def empty(cls, requests: int, tokens: int, plain: bool) -> "Caches":
        pages = -(-tokens // PAGE_SIZE)
        shape = (requests * pages, PAGE_SIZE)
        pool = jnp.zeros((*shape, 576), jnp.bfloat16) if plain else jnp.zeros((*shape, 656), jnp.uint8)
        order = np.random.default_rng(0).permutation(shape[0]).astype(np.int32).reshape(requests, pages)
        return cls(jax.new_ref(pool), jax.new_ref(jnp.zeros((*shape, 132), jnp.uint8)), jnp.asarray(order))


jax.tree_util.register_dataclass(Caches)


def rope_angles(position: jax.Array, dims: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin [T, dims / 2] of each pair's angle at `position` [T]."""
    frequency = theta ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    angle = position.astype(jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The pairs (first, second) rotated, [T, …, dims / 2] each; all first halves stand before all second ones."""
    shape = (cos.shape[0], *[1] * (first.ndim - 2), cos.shape[1])
    cos, sin = cos.reshape(shape).astype(first.dtype), sin.reshape(shape).astype(first.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Indexer(nnx.Module):
    """Queries, keys and head weights of the lightning indexer."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        made = {"param_dtype": config.dtype, "dtype": config.dtype, "rngs": rngs}
        linear = partial(nnx.Linear, use_bias=False, **made)
        self.config = config
        self.wq_b = linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.wk = linear(config.hidden_size, config.index_head_dim)
        self.k_norm = nnx.LayerNorm(config.index_head_dim, epsilon=1e-6, **made)
        self.weights_proj = linear(config.hidden_size, config.index_n_heads)

    def __call__(
        self, x: jax.Array, q_resid: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        dims = self.config.qk_rope_head_dim
        q = self.wq_b(q_resid).reshape(len(x), self.config.index_n_heads, self.config.index_head_dim)
        k = self.k_norm(self.wk(x))

        def rope(v: jax.Array) -> jax.Array:  # pairs of halves, unlike the main attention
            return jnp.concatenate(
                [rotate(v[..., : dims // 2], v[..., dims // 2 : dims], cos, sin), v[..., dims:]], axis=-1
            )

        return rope(q), rope(k), self.weights_proj(x).astype(jnp.float32)


class SparseAttention(nnx.Module):
    """Multi-head latent attention with DeepSeek's sparse indexer, the up-projection of the latent absorbed."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        made = {"param_dtype": config.dtype, "dtype": config.dtype, "rngs": rngs}
        linear = partial(nnx.Linear, use_bias=False, **made)
        norm = partial(nnx.RMSNorm, epsilon=config.rms_norm_eps, **made)
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.config = config
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = norm(config.q_lora_rank)
        self.q_b_proj = linear(config.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(config.hidden_size, config.kv_lora_rank + rope)
        self.kv_a_layernorm = norm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (nope + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config, rngs)

    def project(self, x: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Absorbed queries [T, H, 576], latents [T, 512], roped keys [T, 64], and what the indexer's queries are of."""
        config = self.config
        nope, latent_dims = config.qk_nope_head_dim, config.kv_lora_rank
        cos, sin = rope_angles(position, config.qk_rope_head_dim, config.rope_theta)
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).reshape(len(x), config.num_attention_heads, -1)
        q_nope, q_rope = q[..., :nope], q[..., nope:]
        compressed = self.kv_a_proj_with_mqa(x)
        latent, k_rope = self.kv_a_layernorm(compressed[:, :latent_dims]), compressed[:, latent_dims:]
        q_rope = rotate(q_rope[..., ::2], q_rope[..., 1::2], cos, sin)
        k_rope = rotate(k_rope[..., ::2], k_rope[..., 1::2], cos, sin)
        absorbed = jnp.einsum("thn,lhn->thl", q_nope, self._up()[..., :nope])
        return jnp.concatenate([absorbed, q_rope], axis=-1), latent, k_rope, q_resid

    def index(self, x: jax.Array, q_resid: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The indexer's queries [T, I, D], keys [T, D] and unscaled weights [T, I]."""
        return self.indexer(x, q_resid, *rope_angles(position, self.config.qk_rope_head_dim, self.config.rope_theta))

    def project_back(self, out: jax.Array) -> jax.Array:
        """Attention's out [T, H, 512] as hidden states [T, hidden]."""
        values = jnp.einsum("thl,lhv->thv", out, self._up()[..., self.config.qk_nope_head_dim :])
        return self.o_proj(values.reshape(len(out), -1))

    def _up(self) -> jax.Array:
        """The up-projection of the latent to keys and values of each head: [512, H, 256]."""
        return self.kv_b_proj.kernel[...].reshape(self.config.kv_lora_rank, self.config.num_attention_heads, -1)

    @property
    def softmax_scale(self) -> float:
        return (self.config.qk_nope_head_dim + self.config.qk_rope_head_dim) ** -0.5

    def __call__(self, x: jax.Array, position: jax.Array, caches: Caches) -> jax.Array:
        """Store the keys of new tokens x [T, hidden], T / B of each request, and attend with them: [T, hidden].

        `position` [T] is each token's place in its request; 0 or more keys stand before it in the caches.
        """
        requests = len(caches.block_table)
        slots, _ = xj.map_slots(position.reshape(requests, -1), caches.block_table, page_size=PAGE_SIZE)
        slots = slots.reshape(-1)
        query, latent, k_rope, q_resid = self.project(x, position)
        index_q, index_k, index_weights = self.index(x, q_resid, position)
        if caches.mla.dtype == jnp.bfloat16:
            rows = jnp.concatenate([latent, k_rope], axis=-1)
            caches.mla[slots // PAGE_SIZE, slots % PAGE_SIZE] = rows
        else:
            xj.write_mla_cache(latent, k_rope, slots, caches.mla)
        xj.write_indexer_cache(index_k, slots, caches.indexer)
        out, _, _ = xj.dsa_attention(
            query, index_q, index_weights, caches.mla, caches.indexer, caches.block_table, position + 1,
            k=self.config.index_topk, softmax_scale=self.softmax_scale,
        )  # fmt: skip
        return self.project_back(out)


def load(module: nnx.Module, weights: dict[str, np.ndarray]) -> None:
    """Take the weights of transformers' module, by its names: linear layers are stored transposed."""
    for path, parameter in nnx.iter_graph(module):
        if isinstance(parameter, nnx.Param):
            value = weights[name_of(path)]
            # a copy: asarray may share the memory of weights that torch goes on to train
            parameter.set_value(jnp.array(value.T if path[-1] == "kernel" else value, parameter.dtype))


def name_of(path: Sequence[Any]) -> str:
    """transformers' name of a parameter."""
    *modules, leaf = path
    renamed = "weight" if leaf in ("kernel", "scale", "embedding") else leaf
    return ".".join(map(str, [*modules, renamed]))


def run(layer: SparseAttention, x: jax.Array, prompt: int, plain: bool) -> tuple[jax.Array, int]:
    """One request: the prompt in one call, then one token per step. Outputs [T, hidden]; times a step was traced."""
    graph, state = nnx.split(layer)
    traces = []

    @jax.jit
    def step(state: Any, x: jax.Array, position: jax.Array, caches: Caches) -> jax.Array:
        traces.append(len(x))
        return nnx.merge(graph, state)(x, position, caches)

    caches = Caches.empty(1, len(x), plain)
    place = jnp.arange(len(x), dtype=jnp.int32)
    outs = [step(state, x[:prompt], place[:prompt], caches)]
    outs += [step(state, x[t : t + 1], place[t : t + 1], caches) for t in range(prompt, len(x))]
    return jnp.concatenate(outs), traces.count(1)


def transformers_layer() -> tuple[dict[str, np.ndarray], Any]:
    """The weights of a small random `deepseek_v32` attention, and a function of x [T, hidden] that runs it."""
    import torch

    from xmla.demo.deepseek_v32 import build

    model = build("cpu").float()
    module = model.model.layers[0].self_attn

    @torch.no_grad()
    def attend(x: np.ndarray) -> np.ndarray:
        hidden = torch.from_numpy(x)[None]
        tokens = hidden.shape[1]
        rope = model.model.rotary_emb(hidden, torch.arange(tokens)[None])
        mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
        found = module(hidden, position_embeddings=rope, attention_mask=mask, position_ids=torch.arange(tokens)[None])
        return found[0][0].numpy()

    return {name: value.numpy() for name, value in module.state_dict().items()}, attend


def main() -> None:
    layer = SparseAttention(Config(), nnx.Rngs(0))
    tokens, prompt = 36, 33
    x = np.asarray(jax.random.normal(jax.random.key(1), (tokens, 256), jnp.bfloat16), np.float32)
    try:
        weights, attend = transformers_layer()
    except ImportError:
        out, traces = run(layer, jnp.asarray(x, jnp.bfloat16), prompt, plain=False)
        print(f"out {out.shape} {out.dtype}, {tokens - prompt} decode steps traced {traces} time")
        return
    load(layer, weights)
    want = attend(x)
    # e4m3 rounds a latent by up to 1 / 16; bfloat16 rounds weights, activations and rows by up to 1 / 256. Tokens that
    # see more than K keys may select others than float32 scores do, where two keys all but tie.
    for name, plain, bound in (("fp8 pages", False, 0.05), ("bfloat16 rows", True, 0.01)):
        out, traces = run(layer, jnp.asarray(x, jnp.bfloat16), prompt, plain)
        error = np.linalg.norm(np.asarray(out, np.float32) - want, axis=1) / np.linalg.norm(want, axis=1)
        others = int((error > bound).sum())
        print(
            f"out {out.shape} over {name}: relative difference to transformers {np.median(error):.4f}, "
            f"{others} of {tokens} tokens selected other keys, decode steps traced {traces} time"
        )
        assert traces == 1 and others <= tokens // 10 and error[: layer.config.index_topk].max() < bound


if __name__ == "__main__":
    main()
