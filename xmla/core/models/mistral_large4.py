"""The calls that serving a Mistral-Large-4 model makes, as specs: a layer with rope and one without it per step."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

from xmla.core.models.base import Model
from xmla.core.models.calls import Call
from xmla.core.models.v32 import ModelConfig
from xmla.core.values import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfigMistralLarge4(Model):
    """A Mistral-Large-4 model as an engine serves it: layers with rope and layers without it, as in `ModelConfig`.

    A layer attends to its own latents or to those of an earlier layer of its kind, whose pool it is called with: it
    then writes none. It selects by its own indexer, or attends to the selection of the layer before. So the calls of a
    layer are those listed here, or some of them.

    Attributes:
        heads: Query heads of this rank, H.
        index_heads: Indexer heads, I, of D = `index_dim` dims.
        index_format: Format of the indexer's cache, "fp8", "mxfp4" or "fp8_ue8m0".
        cache_format, nope_format: Formats of the latents' caches: "v32", "plain" or "nvfp4" with rope, "nope" or
            "plain_v4" without.
        k: Selected keys per token.
        page_size: Entries per page of all caches, R.
        softmax_scale, index_scale: As in `dsa_attention`; both are compiled in. The scale that grows with the position
            is a factor of the queries.
        next_n: New tokens of a decoding request (1 + speculative), every value that occurs.
        mixed: Requests of one batch may have different numbers of new tokens, up to the largest of `next_n`.
        batches: Requests of a decode batch, to the largest that occurs; `xmla plan` shows those listed.
        max_lens: Contexts in tokens, to the longest that occurs; a block table has room for that or for less.
        prefill_tokens: Tokens of a prefill step, to the largest that occurs.
        scale_floor: Of what a step writes, as in `write_mla_cache`; by default each op's own.
        workspace_bytes: Of what a step selects, as in `indexer_topk`; by default the ops' own, 2**29.
        batch_invariant: Of attention, as in `sparse_mla`.
    """

    heads: int = 64
    index_heads: int = 32
    index_dim: int = 128
    index_format: str = "fp8"
    cache_format: str = "v32"
    nope_format: str = "nope"
    k: int = 2048
    page_size: int = 64
    softmax_scale: float = 128**-0.5
    index_scale: float | None = None
    dtype: str = "bfloat16"

    @property
    def kinds(self) -> tuple[ModelConfig, ModelConfig]:
        """The layers with rope and those without it."""
        return kinds_of(self)

    @property
    def selected(self) -> tuple[int, ...]:
        return (self.k,)

    def caches(self) -> dict[str, Spec]:
        """The pools; the number of pages is arbitrary, since `specializations` replaces it by few and many."""
        rope, nope = (kind.caches() for kind in self.kinds)
        return {**rope, "nope_cache": nope["mla_cache"]}

    def decode(self, requests: int, next_n: int, max_len: int, mixed: bool = False) -> Iterator[Call]:
        """A decode step of `requests`, with `next_n` tokens each, or up to `next_n` if `mixed`."""
        for kind in self.kinds:
            yield from kind.decode(requests, next_n, max_len, mixed)

    def prefill(self, tokens: int, max_len: int) -> Iterator[Call]:
        """A prefill step of `tokens`."""
        for kind in self.kinds:
            yield from kind.prefill(tokens, max_len)

    def gathering(self, tokens: int, keys: int) -> Iterator[Call]:
        """A prefill step of `tokens`, over so many keys."""
        return self.prefill(tokens, keys)

    def attention(self, tokens: int, *, prefill: bool = False) -> Iterator[Call]:
        """The calls of attention alone of both kinds of layers."""
        for kind in self.kinds:
            yield from kind.attention(tokens, prefill=prefill)


@cache  # a list asks by the thousand
def kinds_of(config: ModelConfigMistralLarge4) -> tuple[ModelConfig, ModelConfig]:
    """The layers with rope and those without it."""
    sizes = {field.name: getattr(config, field.name) for field in fields(config)}
    formats = config.cache_format, sizes.pop("nope_format")
    rope, nope = (ModelConfig(**sizes | {"cache_format": name}, shared_selection=True) for name in formats)
    return rope, nope
