"""The calls that serving a DeepSeek-V4 or V4.1 model makes, as specs: one layer of each kind per step."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import VALUE_DIMS
from xmla.core.models.base import Model, layout_of, split
from xmla.core.models.calls import Call
from xmla.core.values import Spec, cdiv

RATIOS = (4, 128)  # tokens per entry; with 4 the indexer selects entries, with 128 all are attended to
SERIES = {4: 2, 128: 1}
PAGES = 1024  # of every pool; arbitrary, since `specializations` replaces it by few and many


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Base(Model):
    """What V4 and V4.1 have in common: layers that attend to a window, and layers that also attend to selected entries.

    Arrays are dense, except that the page stride of the latent caches is the multiple that allocators of their format
    use. Weights, angles and states are float32.
    """

    heads: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_format: str = "fp8"
    k: int = 1024
    window: int = 128
    cache_format: str = "v4"
    extra_format: str = "v4"
    page_size: int = 64
    entry_pages: tuple[int, int] = (64, 2)
    dense_pages: bool = False
    state_page: int = 8
    softmax_scale: float = VALUE_DIMS**-0.5
    index_scale: float | None = None
    dtype: str = "bfloat16"

    @property
    def indexer(self) -> IndexerLayout:
        return IndexerLayout(self.index_dim, self.index_format)

    @property
    def selected(self) -> tuple[int, ...]:
        return (self.k,)

    def pool(self, name: str, page_size: int) -> Spec:
        layout = layout_of(name, type(self), rope_in_value=True)
        dtype = "uint8" if layout.packed else self.dtype
        strides = None if self.dense_pages else (layout.page_stride(page_size), layout.row, 1)
        return Spec((PAGES, page_size, layout.row), dtype, strides)

    def pages_of(self, ratios: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """The entries of a page of each cache, and the tokens that it stands for, if entries stand for so many."""
        yield self.page_size, self.page_size
        yield from ((entries, ratio * entries) for ratio, entries in zip(ratios, self.entry_pages, strict=True))

    def table(self, requests: int, max_len: int, tokens_a_page: int) -> Spec:
        return Spec((requests, cdiv(max_len, tokens_a_page)), "int32")

    def decode(self, requests: int, next_n: int, max_len: int, mixed: bool = False) -> Iterator[Call]:
        """A layer of each kind in a decode step of `requests`, with `next_n` tokens each, or up to that if `mixed`."""
        if mixed:
            yield split(requests, next_n)
        yield from self.layers(requests * next_n, requests, max_len, mixed)

    def prefill(self, tokens: int, max_len: int) -> Iterator[Call]:
        """A layer of each kind in a prefill step of `tokens`."""
        yield from self.layers(tokens, 1, max_len, with_ids=True)

    @abstractmethod
    def layers(self, tokens: int, requests: int, max_len: int, with_ids: bool) -> Iterator[Call]:
        """A layer of each kind in a step of `tokens`."""

    def write(self, tokens: int, name: str, cache: Spec) -> Call:
        """The call that writes latent entries of the format `name`."""
        layout = layout_of(name, type(self), rope_in_value=True)
        parts = {"latent": Spec((tokens, layout.latent), self.dtype), "rope": Spec((tokens, layout.rope), self.dtype)}
        specs = {**parts, "slots": Spec((tokens,), "int32"), "cache": cache}
        return Call("write_mla_cache", specs, {"cache_format": name, **self.floor})

    def compress(
        self, tokens: int, requests: int, max_len: int, ratio: int, series: int, dim: int, dtype: str, cache: Spec,
        cache_format: str, table: Spec, ids: dict[str, Spec],
    ) -> Call:  # fmt: skip
        """The call of a compressor, of latent entries or of the indexer's keys, from projections of `dtype`."""
        width = series * dim
        projected = Spec((tokens, width), dtype)
        specs = {
            "kv": projected, "score": projected, "ape": Spec((ratio, width), "float32"),
            "norm_weight": Spec((dim,), "float32"), "cos_sin": Spec((max_len, 64), "float32"),
            "positions": Spec((tokens,), "int32"), "state": Spec((PAGES, self.state_page, 2 * width), "float32"),
            "state_table": self.table(requests, max_len, self.state_page), "cache": cache, "block_table": table, **ids,
        }  # fmt: skip
        return Call("compress_kv", specs, {"cache_format": cache_format, **self.floor})

    def attend(
        self, tokens: int, requests: int, max_len: int, ids: dict[str, Spec]
    ) -> tuple[Iterator[Call], Call]:  # fmt: skip
        """The calls that write a window and find its slots, and that of a layer that attends to it alone."""
        cache, layout = self.caches()["window"], layout_of(self.cache_format, type(self), rope_in_value=True)
        a_token = Spec((tokens,), "int32")
        windowed = {"block_table": self.table(requests, max_len, self.page_size), "lengths": a_token, **ids}
        find = Call("window_slots", windowed, {"window": self.window, "page_size": self.page_size})
        attended = {
            "q": Spec((tokens, self.heads, VALUE_DIMS), self.dtype), "cache": cache,
            "slots": Spec((tokens, self.window), "int32"), "lengths": a_token, "sink": Spec((self.heads,), "float32"),
            "cos_sin": Spec((max_len, layout.rope), "float32"), "positions": a_token,
        }  # fmt: skip
        attrs = {"softmax_scale": self.softmax_scale, "cache_format": self.cache_format, **self.invariance}
        return iter((self.write(tokens, self.cache_format, cache), find)), Call("sparse_mla", attended, attrs)

    def attend_to_both(self, alone: Call, cache: Spec, width: int) -> Call:
        """The call of a layer that attends to the window and to `width` entries of `cache`."""
        a_token = alone.specs["lengths"]
        second = {
            "extra_cache": cache, "extra_slots": Spec((a_token.shape[0], width), "int32"), "extra_lengths": a_token,
        }  # fmt: skip
        return Call("sparse_mla", {**alone.specs, **second}, {**alone.attrs, "extra_cache_format": self.extra_format})

    def query(self, tokens: int) -> tuple[Call, dict[str, Spec]]:
        """The call that quantises the indexer's queries, and what it gives."""
        query = Spec((tokens, self.index_heads, self.index_dim), self.dtype)
        weights = Spec((tokens, self.index_heads), "float32")
        attrs = {"scale": self.index_scale, "format": self.indexer.query_format}
        call = Call("quantize_indexer_query", {"q": query, "weights": weights}, attrs)
        return call, {"q8": Spec(query.shape, self.indexer.query_dtype), "weights": weights}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfigV4(V4Base):
    """A DeepSeek-V4 model as an engine serves it: sliding-window layers, and compressed ones with and without indexer.

    Sizes are by default V4-Pro's; V4-Flash has 64 heads and k = 512. Arrays are dense, except that the page stride of
    the latent caches is the multiple that allocators of their format use. Weights, angles and states are float32.

    Attributes:
        heads: Query heads of this rank, H.
        index_heads: Indexer heads, I, of D = `index_dim` dims.
        index_format: Format of the indexer's cache, "fp8", "mxfp4" or "fp8_ue8m0".
        k: Entries that the indexer selects for a token.
        window: Tokens of the sliding window.
        cache_format, extra_format: Formats of the window's cache and of the compressed entries: "v4", "v41" with
            "v41_fp4" (DeepSeek-V4.1 as released), "v41_footer" with "v41_fp4_footer" (before its release), "plain_v4".
        page_size: Entries per page of the window's cache, R: 64 in vLLM, 256 in SGLang.
        entry_pages: Entries per page of the caches of ratio 4 and of ratio 128.
        dense_pages: Whether pages of the latent caches follow each other without padding, as JAX's arrays do.
        state_page: Positions per page of the compressors' states.
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

    def caches(self) -> dict[str, Spec]:
        """The pools, of PAGES each."""
        pools = {"window": self.pool(self.cache_format, self.page_size)}
        for ratio, page_size in zip(RATIOS, self.entry_pages, strict=True):
            pools[f"ratio {ratio}"] = self.pool(self.extra_format, page_size)
        return pools | {"indexer": Spec((PAGES, self.entry_pages[0], self.indexer.row), "uint8")}

    def pages(self) -> Iterator[tuple[int, int]]:
        return self.pages_of(RATIOS)

    def layers(self, tokens: int, requests: int, max_len: int, with_ids: bool) -> Iterator[Call]:
        a_token = Spec((tokens,), "int32")
        ids = {"request_ids": a_token} if with_ids else {}
        caches = self.caches()
        before, alone = self.attend(tokens, requests, max_len, ids)
        yield from before
        yield alone
        for ratio, page_size in zip(RATIOS, self.entry_pages, strict=True):
            cache, entries = caches[f"ratio {ratio}"], self.table(requests, max_len, ratio * page_size)
            of_entries = VALUE_DIMS, self.dtype, cache, self.extra_format
            yield self.compress(tokens, requests, max_len, ratio, SERIES[ratio], *of_entries, entries, ids)
            if ratio == 4:
                yield from self.pick(tokens, requests, max_len, entries, ids)
                yield self.attend_to_both(alone, cache, self.k)
            else:
                yield from self.attend_to_all(alone, cache, entries, ids, max_len)

    def attend_to_all(
        self, alone: Call, cache: Spec, entries: Spec, ids: dict[str, Spec], max_len: int
    ) -> Iterator[Call]:  # fmt: skip
        """The calls of a layer that attends to every entry: its table's, or a context's, which may be any number."""
        page_size, ratio = cache.shape[1], RATIOS[1]
        odd = max_len // ratio // 2 * 2 + 1
        for width, alternative in ((entries.shape[1] * page_size, False), (odd, True)):
            table = {"block_table": entries, "lengths": alone.specs["lengths"], **ids}
            every = {"window": width, "page_size": page_size, "ratio": ratio}
            yield Call("window_slots", table, every, alternative)
            yield replace(self.attend_to_both(alone, cache, width), alternative=alternative)

    def pick(
        self, tokens: int, requests: int, max_len: int, entries: Spec, ids: dict[str, Spec]
    ) -> Iterator[Call]:  # fmt: skip
        """The calls of the indexer: its keys, its queries, the selection, and the selection's slots."""
        cache = self.caches()["indexer"]
        keys = self.index_dim, self.dtype, cache, self.index_format
        yield self.compress(tokens, requests, max_len, 4, SERIES[4], *keys, entries, ids)
        quantize, query = self.query(tokens)
        yield quantize
        picked = {**query, "cache": cache, "block_table": entries, "lengths": Spec((tokens,), "int32"), **ids}
        yield Call("indexer_topk_paged", picked, {"k": self.k, "cache_format": self.index_format, **self.room})
        mapped = {"indices": Spec((tokens, self.k), "int32"), "block_table": entries, **ids}
        yield Call("map_slots", mapped, {"page_size": self.entry_pages[0]})
