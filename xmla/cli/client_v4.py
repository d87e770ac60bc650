"""Hugging Face transformers' own DeepSeek-V4 model, and the same model with xmla as its attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from xmla import torch_api
from xmla.cli.passes import run_cached, run_with
from xmla.core.layout import PLAIN_V4, V4, IndexerLayout, MlaLayout

LAYERS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
RATIO = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
PAGE, STATE_PAGE = 64, 8  # entries a page of the window's cache; positions a page of states
ENTRY_PAGE = {4: 16, 128: 2}  # as engines have them: the same tokens a page


def build(device: str) -> DeepseekV4ForCausalLM:
    """A small random model in float32, one layer of each kind, with DeepSeek-V4's head dims, window, ratios and YaRN.

    float32, so that what differs is xmla's rounding and not the model's own. Weights are twice as wide as the default
    and what starts as zeros or ones is random, so that nothing can be left out unnoticed. Experts are chosen by the
    token's id: a random router sends a token elsewhere for a change in the last bit, which would drown the rest.
    """
    settings: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": len(LAYERS),
        "num_attention_heads": 4, "head_dim": 512, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64,
        "layer_types": list(LAYERS), "mlp_layer_types": ["hash_moe"] * len(LAYERS), "n_routed_experts": 4,
        "num_experts_per_tok": 2, "hc_mult": 2, "sliding_window": 128, "index_n_heads": 4, "index_head_dim": 128,
        "index_topk": 16, "initializer_range": 0.04, "pad_token_id": None, "attn_implementation": "eager",
        "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536},
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = DeepseekV4ForCausalLM(DeepseekV4Config(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                nn.init.normal_(parameter)
            elif name.endswith("norm.weight"):
                nn.init.normal_(parameter, 1.0, 0.2)
        for layer in model.model.layers:
            layer.mlp.gate.tid2eid.random_(4)
    return model.to(device).eval()


@dataclass
class Pool:
    """Shuffled pages for the entries of one request, in a pool in which everything else is NaN."""

    pages: torch.Tensor
    block_table: torch.Tensor  # [1, M]

    @classmethod
    def empty(cls, entries: int, page_size: int, row: int, dtype: torch.dtype, device: str) -> "Pool":
        count = -(-entries // page_size)
        shape = (count + 2, page_size, row * dtype.itemsize)
        order = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count]
        pages = torch.full(shape, 255, dtype=torch.uint8, device=device).view(dtype)
        return cls(pages, order.to(device=device, dtype=torch.int32)[None])

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        size = self.pages.shape[1]
        return self.block_table[0, positions // size] * size + (positions % size).to(torch.int32)


@dataclass
class Call:
    """One call of an op: what it was asked and answered."""

    op: str
    tensors: Sequence[torch.Tensor | None]
    attrs: dict[str, Any]
    results: Any


@dataclass
class Caches:
    """One layer's: entries of the sliding window; states and entries of its compressors, by name."""

    window: Pool
    states: dict[str, Pool]
    entries: dict[str, Pool]

    @classmethod
    def empty(cls, module: Any, tokens: int, layout: MlaLayout, dtype: torch.dtype, device: str) -> "Caches":
        kind = torch.uint8 if layout.packed else dtype
        window = Pool.empty(tokens, PAGE, layout.row, kind, device)
        caches = cls(window, {}, {})
        if module.layer_type in RATIO:
            ratio = RATIO[module.layer_type]
            compressors = {"compressor": (module.compressor, layout.row, kind)}
            if ratio == 4:
                compressors["indexer"] = (module.compressor.indexer, IndexerLayout(128).row, torch.uint8)
            for name, (compressor, row, stored) in compressors.items():
                width = 2 * compressor.kv_proj.out_features
                caches.states[name] = Pool.empty(tokens, STATE_PAGE, width, torch.float32, device)
                caches.entries[name] = Pool.empty(max(tokens // ratio, 1), ENTRY_PAGE[ratio], row, stored, device)
        return caches

    def named(self) -> dict[str, Pool]:
        states = {f"{name} states": pool for name, pool in self.states.items()}
        return {"window": self.window, **states, **{f"{name} entries": pool for name, pool in self.entries.items()}}


@dataclass
class PagedAttention:
    """The forward of a `DeepseekV4Attention` over paged caches, with the module's own weights.

    With `picks` [tokens, K] attention takes these entries instead of the indexer's.
    """

    module: Any
    cos_sin: torch.Tensor  # [S, E], of the layer's rope
    caches: Caches
    dtype: torch.dtype
    picks: torch.Tensor | None
    steps: list[list[Call]] = field(default_factory=list)
    projected: list[torch.Tensor] = field(default_factory=list)
    indices: list[torch.Tensor] = field(default_factory=list)

    def _call(self, op: str, *tensors: torch.Tensor | None, **attrs: Any) -> Any:
        results = getattr(torch_api, op)(*tensors, **attrs)
        self.steps[-1].append(Call(op, tensors, attrs, results))
        return results

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        module, window = self.module, self.caches.window
        batch, tokens = hidden_states.shape[:2]
        if batch != 1:
            raise ValueError(f"one request at a time, got {batch}")
        self.steps.append([])
        angles = position_embeddings[module.rope_layer_type]
        positions = position_ids.reshape(-1).to(torch.int32)
        lengths = positions + 1

        q_residual = module.q_a_norm(module.q_a_proj(hidden_states))
        q = module.q_b_norm(module.q_b_proj(q_residual).view(1, tokens, module.num_heads, -1).transpose(1, 2))
        q = apply_rotary_pos_emb(q, *angles)[0].transpose(0, 1).to(self.dtype).contiguous()
        kv = apply_rotary_pos_emb(module.kv_norm(module.kv_proj(hidden_states))[:, None], *angles)[0, 0]
        parts = (kv[:, : V4.latent].contiguous(), kv[:, V4.latent :].contiguous())
        self._call("write_mla_cache", *parts, window.slots(positions), window.pages)
        sizes = {"window": module.sliding_window, "page_size": PAGE}
        slots, counts = self._call("window_slots", window.block_table, lengths, **sizes)

        extra: tuple[torch.Tensor | None, ...] = (None, None, None)
        if module.compressor is not None:
            extra = self._compressed(hidden_states, q_residual, angles, positions)
        out, _ = self._call(
            "sparse_mla", q, window.pages, slots, counts, module.sinks.float(), *extra, self.cos_sin, positions,
            softmax_scale=float(module.scaling),
        )  # fmt: skip
        grouped = out.to(hidden_states.dtype).reshape(1, tokens, module.config.o_groups, -1)
        projected = module.o_b_proj(module.o_a_proj(grouped).flatten(2))
        self.projected.append(projected[0])
        return projected, None

    def _compress(self, name: str, compressor: Any, hidden_states: torch.Tensor, positions: torch.Tensor) -> Pool:
        """Feed the tokens to a compressor; the pool of its entries."""
        state, entries = self.caches.states[name], self.caches.entries[name]
        self._call(
            "compress_kv", compressor.kv_proj(hidden_states)[0], compressor.gate_proj(hidden_states)[0],
            compressor.position_bias, compressor.kv_norm.weight, self.cos_sin, positions, state.pages,
            state.block_table, entries.pages, entries.block_table, eps=compressor.kv_norm.variance_epsilon,
        )  # fmt: skip
        return entries

    def _compressed(
        self, hidden_states: torch.Tensor, q_residual: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Cache, slots and lengths of the compressed entries that each token attends to."""
        compressor, lengths = self.module.compressor, positions + 1
        entries = self._compress("compressor", compressor, hidden_states, positions)
        page = entries.pages.shape[1]
        if not hasattr(compressor, "indexer"):
            sizes = {"window": entries.block_table.shape[1] * page, "page_size": page}
            every = self._call("window_slots", entries.block_table, lengths, **sizes, ratio=compressor.compress_rate)
            return entries.pages, *every
        if self.picks is not None:
            picks = self.picks[positions.long()]
            return entries.pages, *self._call("map_slots", picks, entries.block_table, page_size=page)

        indexer = compressor.indexer
        keys = self._compress("indexer", indexer, hidden_states, positions)
        q = indexer.q_b_proj(q_residual).view(1, -1, indexer.num_heads, indexer.head_dim).transpose(1, 2)
        q = apply_rotary_pos_emb(q, *angles)[0].transpose(0, 1).contiguous()
        weights = indexer.scorer.weights_proj(hidden_states)[0]
        q8, folded = self._call("quantize_indexer_query", q, weights)
        visible = lengths // compressor.compress_rate
        indices = self._call(
            "indexer_topk_paged", q8, folded, keys.pages, keys.block_table, visible, k=indexer.index_topk
        )
        self.indices.append(indices)
        return entries.pages, *self._call("map_slots", indices, entries.block_table, page_size=page)


@dataclass
class Run:
    """A pass over the text: logits [T, vocab]; what each layer's attention gave [T, hidden]; picks [T, K], if any."""

    logits: torch.Tensor
    attention: list[torch.Tensor]
    indices: list[torch.Tensor | None]
    layers: list[PagedAttention] = field(default_factory=list)


def rope_tables(model: DeepseekV4ForCausalLM, positions: int, device: str) -> dict[str, torch.Tensor]:
    """Cosines and sines [S, E] of both ropes of the model, as it makes them itself."""
    ids, like = torch.arange(positions, device=device)[None], torch.empty(0, device=device)
    ropes = {kind: model.model.rotary_emb(like, position_ids=ids, layer_type=kind) for kind in ("main", "compress")}
    return {kind: torch.cat(angles, dim=-1)[0] for kind, angles in ropes.items()}


@torch.no_grad()
def run_as_shipped(model: DeepseekV4ForCausalLM, tokens: torch.Tensor, prompt: int) -> Run:
    """Prefill and token-by-token decode with the model's own attention, compressors and cache, watched by hooks."""
    modules = [layer.self_attn for layer in model.model.layers]
    attention: list[list[torch.Tensor]] = [[] for _ in modules]
    indices: list[list[torch.Tensor]] = [[] for _ in modules]
    hooks = []
    width = model.config.index_topk
    for module, given, picked in zip(modules, attention, indices, strict=True):
        hooks.append(module.register_forward_hook(lambda _m, _a, got, given=given: given.append(got[0][0])))
        indexer = getattr(module.compressor, "indexer", None)
        if indexer is not None:
            keep = lambda _m, _a, got, picked=picked: picked.append(
                nn.functional.pad(got[0], (0, width - got.shape[2]), value=-1)
            )
            hooks.append(indexer.register_forward_hook(keep))
    logits = run_cached(model, tokens, prompt)
    for hook in hooks:
        hook.remove()
    picks = [torch.cat(picked).to(torch.int32) if picked else None for picked in indices]
    return Run(logits, [torch.cat(given) for given in attention], picks)


@torch.no_grad()
def run_replaced(
    model: DeepseekV4ForCausalLM, tokens: torch.Tensor, prompt: int, packed: bool,
    picks: Sequence[torch.Tensor | None] | None = None,
) -> Run:  # fmt: skip
    """The same with xmla over paged caches in place of every layer's attention.

    `packed`: entries of "v4", bfloat16 queries; else rows and queries of float16, whose rounding is eight times finer.
    """
    layout, dtype = (V4, torch.bfloat16) if packed else (PLAIN_V4, torch.float16)
    device = str(tokens.device)
    modules = [layer.self_attn for layer in model.model.layers]
    tables = rope_tables(model, len(tokens), device)
    caches = [Caches.empty(module, len(tokens), layout, dtype, device) for module in modules]
    layers = [
        PagedAttention(module, tables[module.rope_layer_type], pools, dtype, picked)
        for module, pools, picked in zip(modules, caches, picks or [None] * len(modules), strict=True)
    ]
    logits = run_with(model, layers, tokens, prompt)
    return Run(
        logits,
        [torch.cat(layer.projected) for layer in layers],
        [torch.cat(layer.indices) if layer.indices else None for layer in layers],
        layers,
    )
