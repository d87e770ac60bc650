"""GLM-5.3-Flash of transformers, and the same model with xmla's ops as its attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

from xmla._frameworks import missing
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import NOPE, PLAIN, MlaLayout
from xmla.demo.comparisons import Comparison, against_jax, against_model, against_reference, written_by_reference
from xmla.demo.paged import PagedAttention, Pool
from xmla.demo.passes import Run, attentions, run_with
from xmla.demo.tensors import identical

TITLE = "GLM-5.3-Flash of transformers, attention by xmla"
STORY = {
    "model": "GLM-5.3-Flash of transformers: a linear layer, one that selects pools of four tokens and one that shares "
    "its selection, with its own head dims and little else, random weights in float32",
    "replaced": "the attention of the latter two, by write_mla_cache, pool_keys, indexer_topk_paged, expand_blocks, "
    "map_slots and sparse_mla over shuffled pages of fp8 entries without rope",
}
KINDS = {
    "reference": "each call against the float64 reference on the same inputs: the kernels' share",
    "plain rows": "xmla over float16 rows, with the model's selection, against the model: everything but fp8",
    "as shipped": "xmla over fp8 entries against the model as shipped: mostly the share of fp8",
    "torch = JAX": "the same calls by JAX",
}
PARTS = 4  # of `compare`
PROMPT = 118  # prefill ends within a pool, which decoding completes

PLACES = ("layer 1, full", "layer 2, shared")
POOL = 4  # tokens
PAGE, STATE_PAGE, POOL_PAGE = 64, 8, 16  # entries, positions and pooled keys per page

# Reference: the kernels' share on the very same inputs. Attention's results are rounded to bfloat16 (2**-9), and pools
# whose logits tie may swap.
# Plain rows: queries, rows, probabilities and results of float16, 2**-11 each, with the model's own selection.
# As shipped: e4m3 moves every value by up to 2**-4, 2**-5.3 in the mean square, and with it the selection where logits
# are close. A pool that swaps is 4 of some 33 tokens: of eight decoded ones the error shows each.
BOUNDS = {
    "selection, reference": 0.99,
    "attention, reference": 1e-2,
    "attention, plain rows": 2e-3,
    "logits, plain rows": 2e-3,
    "selection, as shipped": 0.85,
    "attention, as shipped": 0.25,
    "logits, as shipped": 0.2,
}


def build(device: str) -> Glm5NextForConditionalGeneration:
    """A small random model in float32 with GLM-5.3-Flash's head dims, its three kinds of layers and a dense MLP each.

    float32, so that what differs is xmla's rounding and not the model's own. Weights have twice the default standard
    deviation, and what is initialised to zeros or ones is random, so that an op that ignores it gives another result.
    Nothing is seen: the vision tower has one layer.
    """
    text: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1 + len(PLACES),
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": NOPE.latent,
        "qk_nope_head_dim": 256, "v_head_dim": 256, "index_n_heads": 8, "index_head_dim": 128, "index_topk": 32,
        "index_kpool": POOL, "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"], "mlp_layer_types": ["dense"] * 3, "linear_num_heads": 2,
        "linear_head_dim": 64, "hc_mult": 2, "initializer_range": 0.04, "pad_token_id": None,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 256}
    settings: dict[str, Any] = {"text_config": text, "vision_config": vision, "attn_implementation": "eager"}
    torch.manual_seed(0)
    model: Any = Glm5NextForConditionalGeneration(Glm5NextConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("index_kpool_compress_ape"):
                nn.init.normal_(parameter)
            elif name.endswith("index_kpool_compress_gate"):
                nn.init.normal_(parameter, std=0.1)
            elif name.endswith("norm.weight"):
                nn.init.normal_(parameter, 1.0, 0.2)
    return model.to(device).eval()


def empty_pools(module: Any, tokens: int, layout: MlaLayout, dtype: torch.dtype, device: str) -> dict[str, Pool]:
    """One layer's: its entries and, where it has an indexer, the states of its tokens and its pooled keys."""
    pools = {"mla": Pool.empty(tokens, PAGE, layout.row, torch.uint8 if layout.packed else dtype, device)}
    if module.indexer is not None:
        dim = module.indexer.head_dim
        pools["states"] = Pool.empty(tokens, STATE_PAGE, 2 * dim, torch.float32, device)
        pools["keys"] = Pool.empty(tokens // POOL, POOL_PAGE, IndexerLayout(dim).row, torch.uint8, device)
    return pools


@dataclass
class PooledAttention(PagedAttention):
    """The forward of a `Glm5NextTextAttention`; with `selected` [T, K] over these tokens instead of the indexer's."""

    layout: MlaLayout
    dtype: torch.dtype  # of the queries
    selected: torch.Tensor | None
    of_step: torch.Tensor | None = field(default=None, init=False)  # the selection that this or an earlier layer made

    def __call__(self, *inputs: Any, prev_topk_indices: torch.Tensor | None = None, **named: Any) -> Any:
        self.of_step = prev_topk_indices
        projected, weights = super().__call__(*inputs, **named)
        return projected, weights, self.of_step if self.module.next_skip_topk else None

    def attend(self, hidden_states: torch.Tensor, position_embeddings: None, positions: torch.Tensor) -> torch.Tensor:
        module, mla, layout = self.module, self.pools["mla"], self.layout
        tokens = hidden_states.shape[1]
        q_resid = module.q_a_layernorm(module.q_a_proj(hidden_states))
        q = module.q_b_proj(q_resid).view(tokens, module.num_heads, -1)
        up = module.kv_b_proj.weight.view(module.num_heads, -1, layout.latent)
        up_key, up_value = up.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
        roped = hidden_states.new_zeros(tokens, layout.rope)  # a row that has roped dims gets zeros
        query = torch.einsum("thn,hnl->thl", q, up_key)
        query = torch.cat([query, roped[:, None].expand(-1, module.num_heads, -1)], dim=-1).to(self.dtype)
        latent = module.kv_a_layernorm(module.kv_a_proj_with_mqa(hidden_states))[0]
        called = {"cache_format": layout.name}
        self.call("write_mla_cache", latent, roped, mla.slots(positions), mla.pages, **called)
        if self.selected is not None:
            self.of_step = self.selected[positions.long()]
        elif module.indexer is not None:
            self.of_step = self.select(hidden_states, q_resid, positions)
        indices, sizes = self.of_step, {"page_size": PAGE, "compact": True}
        slots, lengths = self.call("map_slots", indices, mla.block_table, **sizes)
        scale = float(module.scaling)
        out, _ = self.call("sparse_mla", query, mla.pages, slots, lengths, softmax_scale=scale, **called)
        value = torch.einsum("thl,hvl->thv", out.to(up_value.dtype), up_value)
        return module.o_proj(value.flatten(1))[None]

    def select(self, hidden_states: torch.Tensor, q_resid: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Positions [T, K + POOL − 1] of the tokens of the best pools and of the incomplete one."""
        indexer, states, keys = self.module.indexer, self.pools["states"], self.pools["keys"]
        lengths = positions + 1
        self.call(
            "pool_keys", indexer.k_norm(indexer.wk(hidden_states))[0],
            nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)[0],
            indexer.index_kpool_compress_ape, positions, states.pages, states.block_table, keys.pages, keys.block_table,
        )  # fmt: skip
        q = indexer.wq_b(q_resid).view(-1, indexer.n_heads, indexer.head_dim)
        q8, weights = self.call("quantize_indexer_query", q, indexer.weights_proj(hidden_states)[0])
        pools = self.call(
            "indexer_topk_paged", q8, weights, keys.pages, keys.block_table, lengths // POOL,
            k=indexer.index_topk // POOL,
        )  # fmt: skip
        indices = self.call("expand_blocks", pools, lengths, granularity=POOL)
        self.indices.append(indices)
        return indices


def run_replaced(
    model: Glm5NextForConditionalGeneration, tokens: torch.Tensor, prompt: int, packed: bool,
    selected: Sequence[torch.Tensor | None] | None = None,
) -> Run:  # fmt: skip
    """A pass with xmla over paged caches in place of the attention of the layers that have one.

    `packed`: entries of "nope" and bfloat16 queries; else rows and queries of float16, whose rounding is 8 times finer.
    With `selected` every layer attends to the first one's, as the model does.
    """
    layout, dtype = (NOPE, torch.bfloat16) if packed else (PLAIN, torch.float16)
    modules = attentions(model)
    first = selected[0] if selected else None
    layers = [
        PooledAttention(
            module, empty_pools(module, len(tokens), layout, dtype, str(tokens.device)), layout, dtype, first
        )
        for module in modules
    ]
    return run_with(model, layers, tokens, prompt)


def compare(
    model: Glm5NextForConditionalGeneration, tokens: torch.Tensor, shipped: Run, begin: Callable[[str], None]
) -> Comparison:
    """Figures of plain rows against the model, and of packed entries against the model, the reference and JAX."""
    prompt = shipped.prompt
    begin("plain rows")
    plain = run_replaced(model, tokens, prompt, packed=False, selected=shipped.indices)
    figures = [*against_model(plain, shipped, "plain rows", PLACES, BOUNDS)]
    begin("fp8 entries")
    packed = run_replaced(model, tokens, prompt, packed=True)
    figures += against_model(packed, shipped, "as shipped", PLACES, BOUNDS)
    begin("reference")
    for where, layer in zip(PLACES, packed.layers, strict=True):
        figures += against_reference(layer, where, "reference", prompt, BOUNDS)
        for (name, pool), want in zip(layer.pools.items(), written_by_reference(layer), strict=True):
            figures.append(identical(f"{name}, reference", where, pool.pages, want))
    if not missing("jax"):
        begin("JAX")
        figures += against_jax(packed.layers, PLACES)
    return Comparison(packed, plain, figures)
