"""The calls that serving a GLM-5.3-Flash model makes, as specs: one layer with attention per step."""

from collections.abc import Iterator
from dataclasses import dataclass

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import MlaLayout
from xmla.core.models.base import Model, layout_of, split
from xmla.core.models.calls import Call
from xmla.core.values import Spec, cdiv

PAGES = 1024  # of every pool; arbitrary, since `specializations` replaces it by few and many


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfigGlmFlash(Model):
    """The layers of a GLM-5.3-Flash model that attend to selected pools of tokens; arrays are dense.

    Attributes:
        heads: Query heads of this rank, H.
        index_heads: Indexer heads, I, of D = `index_dim` dims.
        index_format: Format of the pooled keys, "fp8", "mxfp4" or "fp8_ue8m0".
        cache_format: Format of attention's cache: "nope", "plain_v4" (rows of 512 plain elements, as vLLM stores them
            by default), or "v32" or "plain" with roped dims of 0.
        k: Selected tokens per token besides the tail: k / pool pools.
        pool: Tokens of a pool, the model's index_kpool, a power of two that divides k.
        page_size: Tokens per page of attention's cache, R.
        pool_page: Pooled keys per page of the indexer's cache.
        state_page: Positions per page of the pools' states.
        softmax_scale, index_scale: As in `sparse_mla` and `quantize_indexer_query`; both are compiled in.
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
    cache_format: str = "nope"
    k: int = 2048
    pool: int = 4
    page_size: int = 64
    pool_page: int = 64
    state_page: int = 8
    softmax_scale: float = 256**-0.5
    index_scale: float | None = None
    dtype: str = "bfloat16"

    @property
    def indexer(self) -> IndexerLayout:
        return IndexerLayout(self.index_dim, self.index_format)

    @property
    def layout(self) -> MlaLayout:
        return layout_of(self.cache_format, type(self), rope_in_value=False)

    @property
    def selected(self) -> tuple[int, ...]:
        return (self.k // self.pool,)

    def caches(self) -> dict[str, Spec]:
        """The pools, of PAGES each."""
        layout = self.layout
        return {
            "mla_cache": Spec((PAGES, self.page_size, layout.row), "uint8" if layout.packed else self.dtype),
            "indexer_cache": Spec((PAGES, self.pool_page, self.indexer.row), "uint8"),
        }

    def pages(self) -> Iterator[tuple[int, int]]:
        """The entries of a page of each cache, and the tokens that it stands for."""
        yield self.page_size, self.page_size
        yield self.pool_page, self.pool * self.pool_page

    def decode(self, requests: int, next_n: int, max_len: int, mixed: bool = False) -> Iterator[Call]:
        """A decode step of `requests`, with `next_n` tokens each, or up to `next_n` if `mixed`."""
        if mixed:
            yield split(requests, next_n)
        yield from self.layer(requests * next_n, requests, max_len, mixed)

    def prefill(self, tokens: int, max_len: int) -> Iterator[Call]:
        """A prefill step of `tokens`."""
        yield from self.layer(tokens, 1, max_len, with_ids=True)

    def layer(self, tokens: int, requests: int, max_len: int, with_ids: bool) -> Iterator[Call]:
        a_token, caches = Spec((tokens,), "int32"), self.caches()
        ids = {"request_ids": a_token} if with_ids else {}

        def table(tokens_a_page: int) -> Spec:
            return Spec((requests, cdiv(max_len, tokens_a_page)), "int32")

        latent, rope = (Spec((tokens, dims), self.dtype) for dims in (self.layout.latent, self.layout.rope))
        cached = {"latent": latent, "rope": rope, "slots": a_token, "cache": caches["mla_cache"]}
        yield Call("write_mla_cache", cached, {"cache_format": self.cache_format, **self.floor})
        key, of_pools = Spec((tokens, self.index_dim), self.dtype), table(self.pool * self.pool_page)
        pooled = {
            "keys": key, "gates": key, "ape": Spec((self.pool, self.index_dim), "float32"), "positions": a_token,
            "state": Spec((PAGES, self.state_page, 2 * self.index_dim), "float32"),
            "state_table": table(self.state_page), "cache": caches["indexer_cache"], "block_table": of_pools, **ids,
        }  # fmt: skip
        form = {"cache_format": self.index_format}
        yield Call("pool_keys", pooled, form)
        query = Spec((tokens, self.index_heads, self.index_dim), self.dtype)
        weights = Spec((tokens, self.index_heads), "float32")
        attrs = {"scale": self.index_scale, "format": self.indexer.query_format}
        yield Call("quantize_indexer_query", {"q": query, "weights": weights}, attrs)
        scored = {
            "q8": Spec(query.shape, self.indexer.query_dtype), "weights": weights, "cache": caches["indexer_cache"],
            "block_table": of_pools, "lengths": a_token, **ids,
        }  # fmt: skip
        count = self.k // self.pool
        yield Call("indexer_topk_paged", scored, {"k": count, **form, **self.room})
        selected = {"blocks": Spec((tokens, count), "int32"), "lengths": a_token}
        yield Call("expand_blocks", selected, {"granularity": self.pool})
        width = self.k + self.pool - 1
        mapped = {"indices": Spec((tokens, width), "int32"), "block_table": table(self.page_size), **ids}
        yield Call("map_slots", mapped, {"page_size": self.page_size, "compact": True})
        attended = {
            "q": Spec((tokens, self.heads, self.layout.dims), self.dtype), "cache": caches["mla_cache"],
            "slots": Spec((tokens, width), "int32"), "lengths": a_token,
        }  # fmt: skip
        attrs = {"softmax_scale": self.softmax_scale, "cache_format": self.cache_format, **self.invariance}
        yield Call("sparse_mla", attended, attrs)
