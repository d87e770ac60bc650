"""Prefill and decode over paged fp8 caches: any number of tokens in one jitted function.

The caches of all layers are one array each. Where a layer has a slice of a stack, or a cache of its own that comes out
of a scan, XLA copies pools; where all pages are one pool and each layer adds its first page to the block table, none.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from xmla import jax_api as xj
from xmla.core.errors import ArgumentError
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import V32
from xmla.demo.in_jax.model import Config, Model, Projected

PAGE_SIZE = 64
# A layer's weights are slices of stacks. cuBLAS reads them where they lie. Products that XLA compiles with Triton, or
# merges because they read the same, have them copied in every step: three times the traffic.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
Implementation = Literal["triton", "gluon", "reference"] | None
jitted = partial(jax.jit, donate_argnames="caches", compiler_options=COMPILER_OPTIONS)


@partial(jax.tree_util.register_dataclass, data_fields=["mla", "indexer", "block_table"], meta_fields=[])
@dataclass(frozen=True)
class Caches:
    """The pages of all layers, P of each, layer after layer; who owns which, by its number in a layer."""

    mla: jax.Array  # [layers · P, R, 656] u8
    indexer: jax.Array  # [layers · P, R, 132] u8
    block_table: jax.Array  # [B, M] i32

    @classmethod
    def empty(cls, config: Config, requests: int, tokens: int) -> "Caches":
        """Empty caches with shuffled pages for so many tokens of each request."""
        columns = -(-tokens // PAGE_SIZE)
        pages = config.num_hidden_layers * requests * columns
        rows = V32.row, IndexerLayout(config.index_head_dim).row
        order = jax.random.permutation(jax.random.key(0), requests * columns).astype(jnp.int32)
        mla, indexer = (jnp.zeros((pages, PAGE_SIZE, row), jnp.uint8) for row in rows)
        return cls(mla, indexer, order.reshape(requests, columns))

    @property
    def tokens(self) -> int:
        """The most tokens of a request."""
        return self.block_table.shape[1] * PAGE_SIZE


@partial(jax.tree_util.register_dataclass, data_fields=["token", "position", "end", "temperature"], meta_fields=[])
@dataclass(frozen=True)
class Requests:
    """What the next step reads of B requests."""

    token: jax.Array  # [B] i32, the newest, whose key is not in the caches yet
    position: jax.Array  # [B] i32, its place in the request; −1 where the request has ended, or there is none
    end: jax.Array  # [B] i32, tokens of the request at most, the prompt's included
    temperature: jax.Array  # [B] f32; 0: the most likely token


def run(
    model: Model, tokens: jax.Array, positions: jax.Array, caches: Caches, implementation: Implementation = None
) -> tuple[jax.Array, Caches]:
    """Hidden states [B, N, hidden] of N tokens of each request, and the caches with their keys.

    A token at a position [B, N] of −1 is padding: it writes nothing, and no other reads it.
    """
    config, position = model.config, positions.reshape(-1)
    slots = xj.map_slots(positions, caches.block_table, page_size=PAGE_SIZE)[0].reshape(-1)
    pages = len(caches.mla) // config.num_hidden_layers

    def attend(pools: tuple[jax.Array, jax.Array], first: jax.Array, p: Projected) -> tuple[jax.Array, Any]:
        own = jnp.where(slots < 0, -1, slots + first * PAGE_SIZE)
        out, _, _, mla, indexer = xj.dsa_step(
            p.latent, p.k_rope, p.index_k, own, p.query.astype(jnp.bfloat16), p.index_q, p.index_weights, *pools,
            caches.block_table + first, position + 1, k=config.index_topk, softmax_scale=config.softmax_scale,
            implementation=implementation,
        )  # fmt: skip
        return out, ((mla, indexer), None)

    firsts = jnp.arange(config.num_hidden_layers, dtype=jnp.int32) * pages
    tokens = jnp.where(position < 0, 0, tokens.reshape(-1))
    x, (mla, indexer), _ = model(tokens, position, attend, (caches.mla, caches.indexer), firsts)
    return x.reshape(*positions.shape, -1), Caches(mla, indexer, caches.block_table)


def sample(logits: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
    """A token of each row of logits [B, V], drawn from softmax(logits / temperature), at 0 the most likely."""
    return (logits + temperature[:, None] * jax.random.gumbel(key, logits.shape)).argmax(-1).astype(jnp.int32)


def advance(requests: Requests, token: jax.Array, eos: int) -> tuple[jax.Array, Requests]:
    """The new tokens [B], −1 of requests that had ended, and what the step after them reads."""
    going, place = requests.position >= 0, requests.position + 1
    token = jnp.where(going, token, -1)
    ends = (token == eos) | (place + 1 >= requests.end)
    return token, Requests(token, jnp.where(going & ~ends, place, -1), requests.end, requests.temperature)


@partial(jitted, static_argnames=("eos", "implementation"))
def prefill(
    model: Model, prompts: jax.Array, caches: Caches, end: jax.Array, temperature: jax.Array, key: jax.Array,
    *, eos: int = -1, implementation: Implementation = None,
) -> tuple[jax.Array, Requests, Caches]:  # fmt: skip
    """Write the keys of the prompts and draw the first token of each: tokens [B], what decodes next, the caches.

    Args:
        prompts: [B, N] int32, −1 after a prompt's last token; a row of −1 is no request.
        end: [B] int32, tokens of a request at most, the prompt's included. It ends where its pages do in any case.
        temperature: [B] float32; 0: the most likely token.
        eos: The token that ends a request; −1: none.

    Raises:
        ArgumentError: The prompts have more tokens than a request's pages hold.
    """
    count, place = (prompts >= 0).sum(1), jnp.arange(prompts.shape[1], dtype=jnp.int32)
    if len(place) > caches.tokens:
        raise ArgumentError(
            f"prefill: prompts has {len(place)} tokens of a request, expected at most {caches.tokens}: its pages"
        )
    x, caches = run(model, prompts, jnp.where(prompts < 0, -1, place), caches, implementation)
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    end = jnp.minimum(end, caches.tokens)
    before = Requests(prompts[:, 0], count.astype(jnp.int32) - 1, end, temperature)
    return *advance(before, sample(model.logits(last), temperature, key), eos), caches


@partial(jitted, static_argnames=("eos", "implementation"))
def decode(
    model: Model, requests: Requests, caches: Caches, keys: jax.Array, *, eos: int = -1,
    implementation: Implementation = None,
) -> tuple[jax.Array, Requests, Caches]:  # fmt: skip
    """A step for each of the random keys, in one program: tokens [B, steps], what decodes next, the caches.

    Tokens after a request's end are −1. Steps in several calls have the same tokens as in one.
    """

    def body(carry: tuple[Requests, Caches], key: jax.Array) -> tuple[tuple[Requests, Caches], jax.Array]:
        requests, caches = carry
        x, caches = run(model, requests.token[:, None], requests.position[:, None], caches, implementation)
        token, requests = advance(requests, sample(model.logits(x[:, 0]), requests.temperature, key), eos)
        return (requests, caches), token

    (requests, caches), tokens = jax.lax.scan(body, (requests, caches), keys)
    return tokens.T, requests, caches
