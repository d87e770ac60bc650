"""The calls that serving a DeepSeek-V4.1 model makes, as specs: one layer of each kind per step."""

from collections.abc import Iterator
from dataclasses import dataclass

from xmla.core.formats.mla import VALUE_DIMS
from xmla.core.models.calls import Call
from xmla.core.models.v4 import PAGES, V4Base
from xmla.core.values import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfigV41(V4Base):
    """A DeepSeek-V4.1 model as an engine serves it: sliding-window layers, and layers that also attend to entries.

    Layers of one ratio share a cache of entries, which the first of them writes. Index layers before the source select
    among all entries; the source selects blocks, and the index layers from it on select entries within them. Other
    layers attend to the slots of the index layer before them. `compress_kv` gives the latents of entries as plain rows,
    from projections in float32, and the engine projects the indexer's keys from them. `write_mla_cache` writes the
    entries, which are these latents with rope, and `write_indexer_cache` the keys.

    Attributes:
        heads: Query heads of this rank, H.
        index_heads: Indexer heads, I, of D = `index_dim` dims.
        index_format: Format of the indexer's cache: "mxfp4", "fp8" (as vLLM serves the model on Hopper) or "fp8_ue8m0".
        k: Entries that an index layer selects for a token.
        blocks, granularity: Blocks that the source layer selects for a token, and entries of a block; the newest block
            is always selected.
        window: Tokens of the sliding window.
        cache_format, extra_format: Formats of the window's cache and of the entries: "v41" with "v41_fp4" (as
            released), "v41_footer" with "v41_fp4_footer" (before), "v4" with "v4" (vLLM on Hopper), "plain_v4".
        ratios: Tokens per entry, of each kind of layer with entries.
        page_size: Entries per page of the window's cache, R: 64 in vLLM, 256 in SGLang.
        entry_pages: Entries per page of the caches of entries, and of the indexer's and the latents' of the same ratio.
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

    heads: int = 64
    index_heads: int = 32
    index_format: str = "mxfp4"
    k: int = 512
    blocks: int = 2048
    granularity: int = 8
    cache_format: str = "v41"
    extra_format: str = "v41_fp4"
    ratios: tuple[int, int] = (1, 2)
    entry_pages: tuple[int, int] = (64, 64)

    @property
    def selected(self) -> tuple[int, ...]:
        return self.k, self.blocks * self.granularity

    def caches(self) -> dict[str, Spec]:
        """The pools, of PAGES each."""
        pools = {"window": self.pool(self.cache_format, self.page_size)}
        for ratio, page_size in zip(self.ratios, self.entry_pages, strict=True):
            pools[f"ratio {ratio}"] = self.pool(self.extra_format, page_size)
            pools[f"indexer, ratio {ratio}"] = Spec((PAGES, page_size, self.indexer.row), "uint8")
        return pools

    def pages(self) -> Iterator[tuple[int, int]]:
        return self.pages_of(self.ratios)

    def layers(self, tokens: int, requests: int, max_len: int, with_ids: bool) -> Iterator[Call]:
        a_token = Spec((tokens,), "int32")
        ids = {"request_ids": a_token} if with_ids else {}
        caches = self.caches()
        before, alone = self.attend(tokens, requests, max_len, ids)
        yield from before
        yield alone
        for ratio, page_size in zip(self.ratios, self.entry_pages, strict=True):
            cache, index = caches[f"ratio {ratio}"], caches[f"indexer, ratio {ratio}"]
            entries = self.table(requests, max_len, ratio * page_size)
            latents = VALUE_DIMS, "float32", Spec((PAGES, page_size, VALUE_DIMS), self.dtype), "plain_v4"
            yield self.compress(tokens, requests, max_len, ratio, 1, *latents, entries, ids)
            yield self.write(tokens, self.extra_format, cache)
            keys = Spec((tokens, self.index_dim), self.dtype)
            form = {"cache_format": self.index_format}
            yield Call("write_indexer_cache", {"keys": keys, "slots": a_token, "cache": index}, form)
            quantize, query = self.query(tokens)
            yield quantize
            scored = {**query, "cache": index, "block_table": entries, "lengths": a_token, **ids}
            yield Call("indexer_topk_paged", scored, {"k": self.k, **form, **self.room})
            of_blocks = {"granularity": self.granularity, **form, **self.room}
            yield Call("indexer_blocks_paged", scored, {"k": self.blocks, **of_blocks})
            within = {**scored, "blocks": Spec((tokens, self.blocks), "int32")}
            yield Call("indexer_block_topk_paged", within, {"k": self.k, **of_blocks})
            mapped = {"indices": Spec((tokens, self.k), "int32"), "block_table": entries, **ids}
            yield Call("map_slots", mapped, {"page_size": page_size})
            yield self.attend_to_both(alone, cache, self.k)
