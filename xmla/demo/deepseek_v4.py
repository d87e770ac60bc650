"""DeepSeek-V4 of transformers, and the same model with xmla's ops as its attention."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from xmla._frameworks import missing
from xmla.core.formats import stored_values
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import PLAIN_V4, V4, MlaLayout
from xmla.demo.comparisons import Comparison, against_jax, against_model, against_reference, written_by_reference
from xmla.demo.figures import Figure, figure
from xmla.demo.paged import PagedAttention, Pool
from xmla.demo.passes import Run, attentions, run_with
from xmla.demo.tensors import identical, relative_error
from xmla.torch_api._arrays import to_numpy

TITLE = "DeepSeek-V4 of transformers, attention by xmla"
STORY = {
    "model": "DeepSeek-V4 of transformers: a layer of each kind (sliding window, every 4 tokens compressed, every 128) "
    "with its own head dims and little else, random weights in float32",
    "replaced": "each layer's attention and compressors, by write_mla_cache, compress_kv, indexer_topk_paged, "
    "map_slots or window_slots, and sparse_mla over pages of fp8 entries",
}
KINDS = {
    "reference": "each call against the float64 reference on the same inputs: the kernels' share",
    "plain rows": "xmla over float16 rows, with the model's selection, against the model: everything but fp8",
    "as shipped": "xmla over fp8 entries against the model as shipped: mostly the share of fp8",
    "torch = JAX": "the same calls by JAX",
}
PARTS = 4  # of `compare`
PROMPT = 124  # prefill ends in the first group of 128: its entry is completed while decoding

LAYERS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
PLACES = [f"layer {layer}, {kind.removesuffix('_attention')}" for layer, kind in enumerate(LAYERS)]
RATIO = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
PAGE, STATE_PAGE = 64, 8  # entries per page of the window's cache; positions per page of states
ENTRY_PAGE = {4: 16, 128: 2}  # as engines have them: the same tokens per page

# Reference: the kernels' share on the very same inputs. Results of attention are rounded to bfloat16 (2**-9), keys
# whose logits tie may swap, and an entry computed in float32 may round the other way: then one value of hundreds moves
# by a step of e4m3, 2**-3.
# Plain rows: queries, rows, probabilities and results of float16, 2**-11 each, with the entries that the model's own
# indexer selects: everything but quantisation.
# As shipped: e4m3 moves every value by up to 2**-4, 2**-5.3 in the mean square, and with it the indexer's keys and so
# the selection where logits are close.
BOUNDS = {
    "selection, reference": 0.99,
    "attention, reference": 1e-2,
    "entries, reference": 5e-3,
    "attention, plain rows": 2e-3,
    "logits, plain rows": 2e-3,
    "selection, as shipped": 0.85,
    "attention, as shipped": 0.12,
    "logits, as shipped": 0.12,
}


def build(device: str) -> DeepseekV4ForCausalLM:
    """A small random model in float32, one layer of each kind, with DeepSeek-V4's head dims, window, ratios and YaRN.

    float32, so that what differs is xmla's rounding and not the model's own. Weights have twice the default standard
    deviation, and what is initialised to zeros or ones is random, so that an op that ignores it gives another result.
    Experts are chosen by the token's id: a random router would send a token to another expert for a change in the last
    bit, and the logits would show that instead of what attention does.
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


def empty_pools(module: Any, tokens: int, layout: MlaLayout, dtype: torch.dtype, device: str) -> dict[str, Pool]:
    """One layer's: the entries of its sliding window, then the states and the entries of its compressors, by name."""
    stored = torch.uint8 if layout.packed else dtype
    pools = {"window": Pool.empty(tokens, PAGE, layout.row, stored, device)}
    if module.layer_type not in RATIO:
        return pools
    ratio = RATIO[module.layer_type]
    compressors = {"compressor": (module.compressor, layout.row, stored)}
    if ratio == 4:
        compressors["indexer"] = (module.compressor.indexer, IndexerLayout(128).row, torch.uint8)
    for name, (compressor, _, _) in compressors.items():
        width = 2 * compressor.kv_proj.out_features
        pools[f"{name} states"] = Pool.empty(tokens, STATE_PAGE, width, torch.float32, device)
    for name, (_, row, kind) in compressors.items():
        pools[f"{name} entries"] = Pool.empty(max(tokens // ratio, 1), ENTRY_PAGE[ratio], row, kind, device)
    return pools


@dataclass
class CompressedAttention(PagedAttention):
    """The forward of a `DeepseekV4Attention`; with `selected` [T, K] over these entries instead of the indexer's."""

    cos_sin: torch.Tensor  # [S, E], of the layer's rope
    dtype: torch.dtype  # of the queries
    selected: torch.Tensor | None

    def attend(
        self, hidden_states: torch.Tensor, position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        positions: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        module, window = self.module, self.pools["window"]
        tokens = hidden_states.shape[1]
        angles = position_embeddings[module.rope_layer_type]
        lengths = positions + 1

        q_residual = module.q_a_norm(module.q_a_proj(hidden_states))
        q = module.q_b_norm(module.q_b_proj(q_residual).view(1, tokens, module.num_heads, -1).transpose(1, 2))
        q = apply_rotary_pos_emb(q, *angles)[0].transpose(0, 1).to(self.dtype).contiguous()
        kv = apply_rotary_pos_emb(module.kv_norm(module.kv_proj(hidden_states))[:, None], *angles)[0, 0]
        parts = (kv[:, : V4.latent].contiguous(), kv[:, V4.latent :].contiguous())
        self.call("write_mla_cache", *parts, window.slots(positions), window.pages)
        sizes = {"window": module.sliding_window, "page_size": PAGE}
        slots, counts = self.call("window_slots", window.block_table, lengths, **sizes)

        extra: tuple[torch.Tensor | None, ...] = (None, None, None)
        if module.compressor is not None:
            extra = self._compressed(hidden_states, q_residual, angles, positions)
        out, _ = self.call(
            "sparse_mla", q, window.pages, slots, counts, module.sinks.float(), *extra, self.cos_sin, positions,
            softmax_scale=float(module.scaling),
        )  # fmt: skip
        grouped = out.to(hidden_states.dtype).reshape(1, tokens, module.config.o_groups, -1)
        return module.o_b_proj(module.o_a_proj(grouped).flatten(2))

    def _compress(self, name: str, compressor: Any, hidden_states: torch.Tensor, positions: torch.Tensor) -> Pool:
        """Feed the tokens to a compressor; the pool of its entries."""
        state, entries = self.pools[f"{name} states"], self.pools[f"{name} entries"]
        self.call(
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
            every = self.call("window_slots", entries.block_table, lengths, **sizes, ratio=compressor.compress_rate)
            return entries.pages, *every
        if self.selected is not None:
            selected = self.selected[positions.long()]
            return entries.pages, *self.call("map_slots", selected, entries.block_table, page_size=page)

        indexer = compressor.indexer
        keys = self._compress("indexer", indexer, hidden_states, positions)
        q = indexer.q_b_proj(q_residual).view(1, -1, indexer.num_heads, indexer.head_dim).transpose(1, 2)
        q = apply_rotary_pos_emb(q, *angles)[0].transpose(0, 1).contiguous()
        weights = indexer.scorer.weights_proj(hidden_states)[0]
        q8, folded = self.call("quantize_indexer_query", q, weights)
        visible = lengths // compressor.compress_rate
        indices = self.call(
            "indexer_topk_paged", q8, folded, keys.pages, keys.block_table, visible, k=indexer.index_topk
        )
        self.indices.append(indices)
        return entries.pages, *self.call("map_slots", indices, entries.block_table, page_size=page)


def rope_tables(model: DeepseekV4ForCausalLM, positions: int, device: str) -> dict[str, torch.Tensor]:
    """Cosines and sines [S, E] of both ropes of the model, as it makes them itself."""
    ids, like = torch.arange(positions, device=device)[None], torch.empty(0, device=device)
    ropes = {kind: model.model.rotary_emb(like, position_ids=ids, layer_type=kind) for kind in ("main", "compress")}
    return {kind: torch.cat(angles, dim=-1)[0] for kind, angles in ropes.items()}


def run_replaced(
    model: DeepseekV4ForCausalLM, tokens: torch.Tensor, prompt: int, packed: bool,
    selected: Sequence[torch.Tensor | None] | None = None,
) -> Run:  # fmt: skip
    """A pass with xmla over paged caches in place of every layer's attention.

    `packed`: entries of "v4" and bfloat16 queries; else rows and queries of float16, whose rounding is 8 times finer.
    """
    layout, dtype = (V4, torch.bfloat16) if packed else (PLAIN_V4, torch.float16)
    device = str(tokens.device)
    modules = attentions(model)
    ropes = rope_tables(model, len(tokens), device)
    pools = [empty_pools(module, len(tokens), layout, dtype, device) for module in modules]
    layers = [
        CompressedAttention(module, pool, ropes[module.rope_layer_type], dtype, indices)
        for module, pool, indices in zip(modules, pools, selected or [None] * len(modules), strict=True)
    ]
    return run_with(model, layers, tokens, prompt)


def compare(
    model: DeepseekV4ForCausalLM, tokens: torch.Tensor, shipped: Run, begin: Callable[[str], None]
) -> Comparison:
    """Figures of plain rows against the model, and of packed entries against the model, the reference and JAX."""
    prompt = shipped.prompt
    begin("plain rows")
    plain = run_replaced(model, tokens, prompt, packed=False, selected=shipped.indices)
    figures = [*against_model(plain, shipped, "plain rows", PLACES, BOUNDS)]
    begin("v4 entries")
    packed = run_replaced(model, tokens, prompt, packed=True)
    figures += against_model(packed, shipped, "as shipped", PLACES, BOUNDS)
    begin("reference")
    for place, layer in enumerate(packed.layers):
        figures += against_reference(layer, f"layer {place}", "reference", prompt, BOUNDS)
        figures += entries_against_reference(layer, f"layer {place}")
    if not missing("jax"):
        begin("JAX")
        figures += against_jax(packed.layers, [f"layer {place}" for place in range(len(PLACES))])
    return Comparison(packed, plain, figures)


def entries_against_reference(layer: PagedAttention, where: str) -> Iterator[Figure]:
    """What a layer wrote against what the reference writes: compressed entries by value, all else bit for bit."""
    for (name, pool), want in zip(layer.pools.items(), written_by_reference(layer), strict=True):
        if name.endswith("entries"):
            ours, theirs = _values(pool.pages), _values(want)
            yield figure("entries, reference", f"{where}, {name}", relative_error(ours, theirs), BOUNDS)
        else:
            yield identical(f"{name}, reference", where, pool.pages, want)


def _values(pages: torch.Tensor) -> torch.Tensor:
    """What the entries of a compressor's pool stand for, and zeros where nothing was written."""
    array = to_numpy(pages.cpu())
    dim = 128 if array.shape[2] == IndexerLayout(128).row else 512
    return torch.from_numpy(stored_values(array, dim)).nan_to_num(0.0)
