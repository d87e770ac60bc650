"""The calls that serving one model makes, as specs: what `warmup` compiles and `xmla plan` prints."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from xmla.core.attribute import Attr
from xmla.core.compile import Specialization, specialize
from xmla.core.device import Device
from xmla.core.layout import V32, IndexerLayout
from xmla.core.op import plan_call, registry
from xmla.core.parallel import received_bytes
from xmla.core.plan import Plan, cdiv
from xmla.core.roofline import estimate
from xmla.core.spec import Spec

POOLS = (2, 1 << 20)  # pages: plans may ask whether a pool is small or large beside what refers to it


@dataclass(frozen=True, slots=True)
class Call:
    """One op at given sizes: its arguments' specs by name, and its attributes."""

    op: str
    specs: Mapping[str, Spec]
    attrs: Mapping[str, Any]

    def plan(self, device: Device, implementation: str | None = None) -> Plan:
        op = registry()[self.op]
        attrs = op.defaults | dict(self.attrs)
        specs = tuple(self.specs.get(name) for name in op.tensors)
        return plan_call(op, specs, tuple(attrs[attr.name] for attr in op.attrs), device, implementation)[0]

    def over(self, pages: int) -> "Call":
        """The call over pools of so many pages."""
        tensors = registry()[self.op].tensors
        pools = {name: spec for name, spec in self.specs.items() if tensors[name].names[0] in ("P", "EXTRA_P")}
        pools = {name: replace(spec, shape=(pages, *spec.shape[1:])) for name, spec in pools.items()}
        return replace(self, specs={**self.specs, **pools})

    def estimate(self, device: Device, keys: int | None = None) -> float | None:
        """Seconds at least, by the roofline, with `keys` in every request, by default as many as fit."""
        op = registry()[self.op]
        return estimate(op.bind(self.specs, op.defaults | dict(self.attrs)), self.plan(device), device, keys)


def split(requests: int, next_n: int) -> Call:
    """What tells a mixed batch of up to `next_n` tokens a request apart."""
    batch = {"query_starts": Spec((requests + 1,), "int32"), "lengths": Spec((requests,), "int32")}
    return Call("split_batch", batch, {"num_tokens": requests * next_n, "decode_threshold": next_n})


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ABC):
    """What serving a model calls, at every size that occurs; each model says what the sizes mean."""

    next_n: tuple[int, ...] = (1,)
    mixed: bool = False
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    max_lens: tuple[int, ...] = (4096, 32768, 131072)
    prefill_tokens: tuple[int, ...] = (2048, 8192)

    def __post_init__(self) -> None:
        """Raise ArgumentError for a field of another type than declared."""
        for field in fields(self):
            declared = Attr.of(field.name, field.type, field.default)
            object.__setattr__(self, field.name, declared.plain(type(self).__name__, getattr(self, field.name)))

    @abstractmethod
    def decode(self, requests: int, next_n: int, max_len: int, mixed: bool = False) -> Iterator[Call]:
        """A decode step of `requests`, with `next_n` tokens each, or `mixed` up to so many."""

    @abstractmethod
    def prefill(self, tokens: int, max_len: int) -> Iterator[Call]:
        """A prefill step of `tokens`."""

    def steps(self) -> Iterator[tuple[str, list[Call]]]:
        """Every step that the lists describe, by what it is, and its calls."""
        for max_len in self.max_lens:
            for requests in self.batches:
                for next_n in self.next_n:
                    step = f"decode {requests} requests × {next_n}, max_len {max_len}"
                    yield step, list(self.decode(requests, next_n, max_len))
                if self.mixed:
                    step = f"decode {requests} requests × {max(self.next_n)}, mixed, max_len {max_len}"
                    yield step, list(self.decode(requests, max(self.next_n), max_len, mixed=True))
            for tokens in self.prefill_tokens:
                yield f"prefill {tokens} tokens, max_len {max_len}", list(self.prefill(tokens, max_len))

    def specializations(self, device: Device) -> list[Specialization]:
        """The closed list of kernels that these steps launch on `device`, each once, in order of first use."""
        found: dict[Specialization, None] = {}
        for _, calls in self.steps():
            for call in (call.over(pages) for call in calls for pages in POOLS):
                plan = call.plan(device)
                found |= dict.fromkeys(specialize(launch, plan, call.specs) for launch in plan.active)
        return list(found)


@dataclass(frozen=True, slots=True)
class ModelConfig(Model):
    """A DeepSeek-V3.2 model as an engine serves it; arrays are dense, as engines allocate them.

    Attributes:
        heads: Query heads of this rank, H.
        index_heads: Indexer heads, I, of D = `index_dim` dims.
        index_format: Of the indexer's cache, "fp8" or "mxfp4".
        k: Selected keys a token.
        page_size: Entries a page of both caches, R.
        softmax_scale, index_scale: As `dsa_attention`; both are compiled in.
        next_n: Tokens a decoding request has at once (1 + speculative), every value that occurs.
        mixed: Requests of one batch may have different numbers of new tokens, up to the largest of `next_n`.
        batches: Requests of a decode batch, every value that occurs (an engine's CUDA-graph sizes).
        max_lens: Longest contexts: the block table's width in keys, every value that occurs.
        prefill_tokens: Tokens of a prefill step, and with them the keys: every value that occurs.
        sink: Whether attention has a sink.
        ranks: Ranks that share each request's pages, interleaved: decode steps are then those of `ContextParallel`.
    """

    heads: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_format: str = "fp8"
    k: int = 2048
    page_size: int = 64
    softmax_scale: float = 192**-0.5
    index_scale: float | None = None
    dtype: str = "bfloat16"
    sink: bool = False
    ranks: int = 1

    @property
    def indexer(self) -> IndexerLayout:
        return IndexerLayout(self.index_dim, self.index_format)

    def caches(self) -> dict[str, Spec]:
        """Both pools, of any number of pages: `specializations` asks for few and many."""
        return {
            "mla_cache": Spec((1024, self.page_size, V32.row), "uint8"),
            "indexer_cache": Spec((1024, self.page_size, self.indexer.row), "uint8"),
        }

    def writes(self, tokens: int) -> Iterator[Call]:
        caches, slots = self.caches(), Spec((tokens,), "int32")
        latent, rope = Spec((tokens, V32.latent), self.dtype), Spec((tokens, V32.rope), self.dtype)
        keys = Spec((tokens, self.index_dim), self.dtype)
        cached = {"latent": latent, "rope": rope, "slots": slots, "cache": caches["mla_cache"]}
        yield Call("write_mla_cache", cached, {})
        yield Call("write_indexer_cache", {"keys": keys, "slots": slots, "cache": caches["indexer_cache"]}, {})

    def queries(self, tokens: int) -> dict[str, Spec]:
        return {
            "q": Spec((tokens, self.heads, V32.latent + V32.rope), self.dtype),
            "index_q": Spec((tokens, self.index_heads, self.index_dim), self.dtype),
            "index_weights": Spec((tokens, self.index_heads), "float32"),
        }

    def table(self, requests: int, max_len: int) -> Spec:
        return Spec((requests, cdiv(max_len, self.page_size)), "int32")

    def decode(self, requests: int, next_n: int, max_len: int, mixed: bool = False) -> Iterator[Call]:
        """A decode step of `requests`, with `next_n` tokens each, or `mixed` up to so many."""
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
        attrs = {"k": self.k, "softmax_scale": self.softmax_scale, "index_scale": self.index_scale}
        yield Call("dsa_attention", specs, attrs)

    def shared(self, tokens: int, requests: int, max_len: int, mixed: bool) -> Iterator[Call]:
        """What `ContextParallel.dsa_attention` calls on each rank, with the strides that torch's exchanges leave."""
        queries, caches, ranks = self.queries(tokens), self.caches(), self.ranks
        ids = {"request_ids": Spec((tokens,), "int32")} if mixed else {}
        sink = {"sink": Spec((self.heads,), "float32")} if self.sink else {}
        own = self.table(requests, cdiv(max_len, ranks))
        lengths, slots = Spec((tokens,), "int32"), Spec((tokens, self.k), "int32")
        index = {"q": queries["index_q"], "weights": queries["index_weights"]}
        yield Call("quantize_indexer_query", index, {"scale": self.index_scale, "format": self.index_format})
        index = {
            "q8": Spec(queries["index_q"].shape, self.indexer.query_dtype), "weights": queries["index_weights"],
            "cache": caches["indexer_cache"], "block_table": own, "lengths": lengths, **ids,
        }  # fmt: skip
        yield Call("indexer_logits_paged", index, {})
        logits = Spec((tokens, own.shape[1] * self.page_size), "float32")
        yield Call("select_topk", {"logits": logits, "ends": lengths}, {"k": self.k})
        strides = (2 * tokens * self.k, self.k, 1)
        candidates = {
            name: Spec((ranks, *slots.shape), dtype, strides)
            for name, dtype in (("values", "float32"), ("indices", "int32"))
        }
        yield Call("merge_topk", candidates, {"k": self.k})
        mapped = {"indices": slots, "block_table": self.table(requests, max_len), **ids}
        yield Call("map_slots", mapped, {"page_size": self.page_size, "compact": True})
        attended = {"q": queries["q"], "cache": caches["mla_cache"], "slots": slots, "lengths": lengths}
        yield Call("sparse_mla", attended, {"softmax_scale": self.softmax_scale})
        row = V32.latent * 2  # bytes; a rank sends its rows and then its float32 lses
        part = tokens * self.heads * (row + 4)
        outs = Spec(
            (ranks, tokens, self.heads, V32.latent), self.dtype, (part // 2, self.heads * V32.latent, V32.latent, 1)
        )
        lses = Spec((ranks, tokens, self.heads), "float32", (part // 4, self.heads, 1))
        yield Call("merge_attention", {"outs": outs, "lses": lses, **sink}, {})

    def exchanged(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Bytes that each rank receives in every decode step, a layer, by what they are."""
        for requests in self.batches:
            for next_n in self.next_n:
                step = f"decode {requests} requests × {next_n}"
                yield step, received_bytes(requests * next_n, self.heads, self.k, self.ranks)

    def prefill(self, tokens: int, max_len: int) -> Iterator[Call]:
        """A prefill step of `tokens`, over as many keys as fit, gathered from the indexer's pages."""
        keys = max(max_len, tokens)
        queries, caches, rows = self.queries(tokens), self.caches(), Spec((tokens,), "int32")
        yield from self.writes(tokens)
        yield Call("read_indexer_cache", {"cache": caches["indexer_cache"], "slots": Spec((keys,), "int32")},
                   {"cache_format": self.index_format})  # fmt: skip
        yield Call(
            "quantize_indexer_query", {"q": queries["index_q"], "weights": queries["index_weights"]},
            {"scale": self.index_scale, "format": self.index_format},
        )  # fmt: skip
        logits = {
            "q8": Spec(queries["index_q"].shape, self.indexer.query_dtype),
            "weights": Spec(queries["index_weights"].shape, "float32"),
            "keys": Spec((keys, self.indexer.value_bytes), self.indexer.dtypes[0]),
            "key_scales": Spec((keys,), self.indexer.dtypes[1]),
            "starts": rows,
            "ends": rows,
        }
        yield Call("indexer_topk", logits, {"k": self.k})
        slots = Spec((tokens, self.k), "int32")
        mapped = {"indices": slots, "block_table": self.table(1, keys), "request_ids": rows}
        yield Call("map_slots", mapped, {"page_size": self.page_size})
        attended = {"q": queries["q"], "cache": caches["mla_cache"], "slots": slots}
        if self.sink:
            attended["sink"] = Spec((self.heads,), "float32")
        yield Call("sparse_mla", attended, {"softmax_scale": self.softmax_scale})
