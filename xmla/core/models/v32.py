"""The calls that serving a DeepSeek-V3.2 model makes, as specs: one layer per step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import VALUE_DIMS, MlaLayout
from xmla.core.models.base import Model, layout_of, split
from xmla.core.models.calls import Call
from xmla.core.parallel import LOGITS_BYTES, parts, received_bytes
from xmla.core.values import Spec, cdiv

YARN = 0.1 * math.log(40) + 1.0  # DeepSeek-V3.2's, of 40 times the context it was first trained on (arXiv 2309.00071)


@dataclass(frozen=True, slots=True)
class ModelConfig(Model):
    """A DeepSeek-V3.2 or GLM model as an engine serves it; arrays are dense, as engines allocate them.

    Attributes:
        heads: Query heads of this rank, H.
        index_heads: Indexer heads, I, of D = `index_dim` dims.
        index_format: Format of the indexer's cache, "fp8", "mxfp4" or "fp8_ue8m0".
        cache_format: Format of attention's cache: "v32", "plain" rows, "nvfp4", and without roped dims "nope" or
            "plain_v4".
        k: Selected keys per token.
        shared_selection: Whether some layers attend over the selection of an earlier one, as GLM's do, by
            `sparse_mla_paged`.
        page_size: Entries per page of both caches, R.
        softmax_scale, index_scale: As in `dsa_attention`; both are compiled in. The first is by default that of
            DeepSeek-V3.2 as released, 192**-0.5 times the square of YaRN's factor, in the order in which vLLM, SGLang
            and transformers multiply: to the last bit.
        next_n: New tokens of a decoding request (1 + speculative), every value that occurs.
        mixed: Requests of one batch may have different numbers of new tokens, up to the largest of `next_n`.
        batches: Requests of a decode batch, to the largest that occurs; `xmla plan` shows those listed.
        max_lens: Contexts, which are the block table's widths in keys, to the longest that occurs.
        prefill_tokens: Tokens of a prefill step, which are also the least keys, to the largest that occurs.
        scale_floor: Of what a step writes, as in `write_mla_cache`; by default each op's own.
        workspace_bytes: Of what a step selects, as in `indexer_topk`; by default the ops' own, 2**29.
        batch_invariant: Of attention, as in `sparse_mla`.
        sink: Whether attention has a sink.
        ranks: Ranks over which each request's pages are interleaved; decode steps are then those of `ContextParallel`.
    """

    heads: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_format: str = "fp8"
    cache_format: str = "v32"
    k: int = 2048
    shared_selection: bool = False
    page_size: int = 64
    softmax_scale: float = 192**-0.5 * YARN * YARN
    index_scale: float | None = None
    dtype: str = "bfloat16"
    sink: bool = False
    ranks: int = 1
    max_lens: tuple[int, ...] = (163840,)

    @property
    def indexer(self) -> IndexerLayout:
        return IndexerLayout(self.index_dim, self.index_format)

    @property
    def layout(self) -> MlaLayout:
        return layout_of(self.cache_format, type(self), rope_in_value=False)

    @property
    def selected(self) -> tuple[int, ...]:
        return (self.k,)

    def caches(self) -> dict[str, Spec]:
        """Specs of both pools; the number of pages is any, since `specializations` replaces it by few and many."""
        layout = self.layout
        return {
            "mla_cache": Spec((1024, self.page_size, layout.row), "uint8" if layout.packed else self.dtype),
            "indexer_cache": Spec((1024, self.page_size, self.indexer.row), "uint8"),
        }

    def writes(self, tokens: int) -> Iterator[Call]:
        caches, slots = self.caches(), Spec((tokens,), "int32")
        latent, rope = (Spec((tokens, dims), self.dtype) for dims in (self.layout.latent, self.layout.rope))
        keys = Spec((tokens, self.index_dim), self.dtype)
        cached = {"latent": latent, "rope": rope, "slots": slots, "cache": caches["mla_cache"]}
        yield Call("write_mla_cache", cached, {"cache_format": self.cache_format, **self.floor})
        stored = {"keys": keys, "slots": slots, "cache": caches["indexer_cache"]}
        yield Call("write_indexer_cache", stored, {"cache_format": self.index_format})

    def step(self, tokens: int, specs: dict[str, Spec], attrs: dict[str, Any]) -> Call:
        """The one call that a caller may make in place of both writes and `dsa_attention`."""
        latent, keys = self.writes(tokens)
        written = {"latent": latent.specs["latent"], "rope": latent.specs["rope"], "index_k": keys.specs["keys"]}
        specs = {**written, "entry_slots": latent.specs["slots"], **specs}
        return Call("dsa_step", specs, attrs | self.floor, alternative=True)

    def queries(self, tokens: int) -> dict[str, Spec]:
        return {
            "q": Spec((tokens, self.heads, self.layout.dims), self.dtype),
            "index_q": Spec((tokens, self.index_heads, self.index_dim), self.dtype),
            "index_weights": Spec((tokens, self.index_heads), "float32"),
        }

    def table(self, requests: int, max_len: int) -> Spec:
        return Spec((requests, cdiv(max_len, self.page_size)), "int32")

    def decode(self, requests: int, next_n: int, max_len: int, mixed: bool = False) -> Iterator[Call]:
        """A decode step of `requests`, with `next_n` tokens each, or up to `next_n` if `mixed`."""
        tokens = requests * next_n
        yield from self.writes(tokens)
        if mixed:
            yield split(requests, next_n)
        if self.ranks > 1:
            yield from self.shared(tokens, requests, max_len, mixed)
            return
        specs = {
            **self.queries(tokens), **self.caches(), "block_table": self.table(requests, max_len),
            "lengths": Spec((tokens,), "int32"),
        }  # fmt: skip
        if mixed:
            specs["request_ids"] = Spec((tokens,), "int32")
        if self.sink:
            specs["sink"] = Spec((self.heads,), "float32")
        scale = {"softmax_scale": self.softmax_scale, **self.invariance}
        formats = {"mla_cache_format": self.cache_format, "indexer_cache_format": self.index_format}
        attrs = {"k": self.k, "index_scale": self.index_scale, **formats, **self.room}
        yield Call("dsa_attention", specs, scale | attrs)
        yield self.step(tokens, specs, scale | attrs)
        if self.shared_selection:
            attention = {
                name: spec for name, spec in specs.items() if not name.startswith("index") and name != "mla_cache"
            }
            attention |= {"cache": specs["mla_cache"], "indices": Spec((tokens, self.k), "int32")}
            yield Call("sparse_mla_paged", attention, scale | {"cache_format": self.cache_format})

    def shared(self, tokens: int, requests: int, max_len: int, mixed: bool) -> Iterator[Call]:
        """The calls of `ContextParallel.dsa_attention` on each rank, with the strides that torch's exchanges leave."""
        queries, caches, ranks = self.queries(tokens), self.caches(), self.ranks
        ids = {"request_ids": Spec((tokens,), "int32")} if mixed else {}
        lengths, slots = Spec((tokens,), "int32"), Spec((tokens, self.k), "int32")
        index = {"q": queries["index_q"], "weights": queries["index_weights"]}
        quantized = {"scale": self.index_scale, "format": self.indexer.query_format}
        yield Call("quantize_indexer_query", index, quantized)
        yield from self.stored(tokens, requests, cdiv(self.table(1, max_len).shape[1], ranks), mixed)
        strides = (2 * tokens * self.k, self.k, 1)
        candidates = {
            name: Spec((ranks, *slots.shape), dtype, strides)
            for name, dtype in (("values", "float32"), ("indices", "int32"))
        }
        yield Call("merge_topk", candidates, {"k": self.k})
        mapped = {"indices": slots, "block_table": self.table(requests, max_len), **ids}
        yield Call("map_slots", mapped, {"page_size": self.page_size, "compact": True})
        attended = {"q": queries["q"], "cache": caches["mla_cache"], "slots": slots, "lengths": lengths}
        attrs = {"softmax_scale": self.softmax_scale, "cache_format": self.cache_format, **self.invariance}
        yield Call("sparse_mla", attended, attrs)
        yield self.merged(tokens, self.heads)
        if self.heads % ranks == 0:  # with scatter_heads
            yield replace(self.merged(tokens, self.heads // ranks), alternative=True)

    def stored(self, tokens: int, requests: int, width: int, mixed: bool) -> Iterator[Call]:
        """The calls of `ContextParallel.select` over tables of `width` pages, of all tokens or in parts of them."""
        columns = width * self.page_size
        rows = parts(tokens, columns, LOGITS_BYTES)
        for part in rows:
            count = len(range(tokens)[part])
            a_token = Spec((count,), "int32")
            queries = self.queries(count)
            index = {
                "q8": Spec(queries["index_q"].shape, self.indexer.query_dtype), "weights": queries["index_weights"],
                "cache": self.caches()["indexer_cache"], "block_table": Spec((requests, width), "int32"),
                "lengths": a_token, **({"request_ids": a_token} if mixed or len(rows) > 1 else {}),
            }  # fmt: skip
            yield Call("indexer_logits_paged", index, {"cache_format": self.index_format})
            logits = Spec((count, columns), "float32")
            yield Call("select_topk", {"logits": logits, "ends": a_token}, {"k": self.k})

    def merged(self, tokens: int, heads: int) -> Call:
        """The call of `ContextParallel.merge`, of so many heads."""
        row = VALUE_DIMS * 2  # bytes; a rank sends its rows and then its float32 lses
        part = tokens * heads * (row + 4)
        strides = (part // 2, heads * VALUE_DIMS, VALUE_DIMS, 1)
        outs = Spec((self.ranks, tokens, heads, VALUE_DIMS), self.dtype, strides)
        lses = Spec((self.ranks, tokens, heads), "float32", (part // 4, heads, 1))
        sink = {"sink": Spec((heads,), "float32")} if self.sink else {}
        return Call("merge_attention", {"outs": outs, "lses": lses, **sink}, {})

    def exchanged(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Bytes that each rank receives per layer in every decode step, by their content."""
        for requests in self.batches:
            for next_n in self.next_n:
                step = f"decode {requests} requests × {next_n}"
                yield step, received_bytes(requests * next_n, self.heads, self.k, self.ranks)

    def prefill(self, tokens: int, max_len: int) -> Iterator[Call]:
        """A prefill step of `tokens`, over the most keys of a request, gathered from the indexer's pages."""
        keys = max(max_len, tokens)
        queries, caches, rows = self.queries(tokens), self.caches(), Spec((tokens,), "int32")
        yield from self.writes(tokens)
        yield Call("read_indexer_cache", {"cache": caches["indexer_cache"], "slots": Spec((keys,), "int32")},
                   {"cache_format": self.index_format})  # fmt: skip
        yield Call(
            "quantize_indexer_query", {"q": queries["index_q"], "weights": queries["index_weights"]},
            {"scale": self.index_scale, "format": self.indexer.query_format},
        )  # fmt: skip
        logits = {
            "q8": Spec(queries["index_q"].shape, self.indexer.query_dtype),
            "weights": Spec(queries["index_weights"].shape, "float32"),
            "keys": Spec((keys, self.indexer.value_bytes), self.indexer.dtypes[0]),
            "key_scales": Spec((keys,), self.indexer.dtypes[1]),
            "starts": rows,
            "ends": rows,
        }
        yield Call("indexer_topk", logits, {"k": self.k, **self.room})
        slots = Spec((tokens, self.k), "int32")
        mapped = {"indices": slots, "block_table": self.table(1, keys), "request_ids": rows}
        yield Call("map_slots", mapped, {"page_size": self.page_size})
        yield self.attended(tokens)

    def gathering(self, tokens: int, keys: int) -> Iterator[Call]:
        """A prefill step of `tokens`, over so many keys."""
        return self.prefill(tokens, keys)

    def attention(self, tokens: int, *, prefill: bool = False) -> Iterator[Call]:
        """The calls that have attention: alone its kernels would differ, whose slots earlier launches write."""
        calls = self.decode(tokens, 1, max(self.max_lens))
        yield from (call for call in calls if call.op in ("dsa_attention", "sparse_mla_paged"))
        yield from Model.attention(self, tokens, prefill=prefill)

    def attended(self, tokens: int) -> Call:
        """The call of attention over slots."""
        specs = {"q": self.queries(tokens)["q"], "cache": self.caches()["mla_cache"]}
        specs["slots"] = Spec((tokens, self.k), "int32")
        if self.sink:
            specs["sink"] = Spec((self.heads,), "float32")
        attrs = {"softmax_scale": self.softmax_scale, "cache_format": self.cache_format, **self.invariance}
        return Call("sparse_mla", specs, attrs)
