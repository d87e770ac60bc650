"""DeepSeek-V3.2 of transformers, and the same model with `dsa_attention` as its attention."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from xmla._frameworks import missing
from xmla.core.formats.indexer import IndexerLayout
from xmla.core.formats.mla import PLAIN, V32, MlaLayout
from xmla.core.registry import registry
from xmla.demo.comparisons import Comparison, against_model, against_reference, by_jax, flatten, written_by_jax
from xmla.demo.figures import Figure
from xmla.demo.paged import PagedAttention, Pool
from xmla.demo.passes import Run, attentions, run_with
from xmla.demo.tensors import errors, identical

TITLE = "DeepSeek-V3.2 of transformers, attention by xmla"
STORY = {
    "model": "DeepSeek-V3.2 of transformers: two layers with its own head dims (latent 512, rope 64, indexer 128) and "
    "little else, random weights in bfloat16",
    "replaced": "each layer's attention, by write_mla_cache, write_indexer_cache and dsa_attention over shuffled pages "
    "of fp8 entries",
}
KINDS = {
    "same caches": "xmla against the float64 reference on the same fp8 caches: the kernels' share",
    "plain rows": "xmla over bfloat16 rows, with the model's selection, against the model: everything but fp8",
    "as shipped": "xmla over fp8 entries against the model as shipped: mostly the share of fp8",
    "torch = JAX": "the same calls by JAX",
}
PARTS = 5  # of `compare`; on a GPU one more
PROMPT = 120
PLACES = ("layer 0", "layer 1")
PAGE = 64  # entries
Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of each token's position

# Same caches: on the inputs of each step only the kernels can differ from the reference. Results are rounded to
# bfloat16 (2**-9), and two summation orders in float32 may swap keys whose logits tie. Over a whole run those roundings
# reach the next layer's queries, whose own rounding to fp8 may then swap one key of 32: a few percent of a token.
# Plain rows: queries, rows and results of bfloat16, 2**-9 each, in another order of operations than the model's.
# As shipped: fp8's share comes on top. 3 bits of mantissa move every key by up to 2**-4, and with it the selection
# where logits are close.
BOUNDS = {
    "selection, same caches": 0.99,
    "attention, same caches": 1e-2,
    "logits, same caches": 5e-2,
    "attention, plain rows": 1e-2,
    "logits, plain rows": 2e-2,
    "selection, as shipped": 0.85,
    "attention, as shipped": 0.25,
    "logits, as shipped": 0.2,
}


def build(device: str, index_topk: int = 32) -> DeepseekV32ForCausalLM:
    """A small random model in bfloat16 with DeepSeek-V3.2's head dims and little of everything else.

    Weights have twice the default standard deviation: at hidden size 256 the default gives attention so flat that a
    wrong selection hardly shows. Both layers have a dense MLP: a random router would send a token to another expert
    for a change in the last bit, and the logits would show that instead of what attention does. RoPE's frequencies are
    of float32, as those of a checkpoint that is loaded: a model that is cast as a whole has them rounded too.
    """
    settings: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": len(PLACES),
        "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2, "max_position_embeddings": 4096,
        "q_lora_rank": 128, "kv_lora_rank": V32.latent, "qk_rope_head_dim": V32.rope, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "index_n_heads": 4, "index_head_dim": 128, "index_topk": index_topk,
        "initializer_range": 0.04, "pad_token_id": None, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DeepseekV32Config(**settings), dtype=torch.bfloat16)
    return model.to(device).eval()


@dataclass(frozen=True)
class Projected:
    """What attention reads of N tokens, flat over all texts; the up-projection of the latent is in the query."""

    query: torch.Tensor  # [N, H, L+E]
    latent: torch.Tensor  # [N, L]
    k_rope: torch.Tensor  # [N, E]
    q_resid: torch.Tensor  # [B, T, q_lora_rank], which the indexer reads


def project(module: Any, hidden_states: torch.Tensor, position_embeddings: Rope) -> Projected:
    """Queries and keys of a `DeepseekV32Attention` for hidden states [B, T, hidden]."""
    q_resid = module.q_a_layernorm(module.q_a_proj(hidden_states))
    q = module.q_b_proj(q_resid).view(*q_resid.shape[:2], module.num_heads, -1).transpose(1, 2)
    q_nope, q_rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    latent, k_rope = module.kv_a_proj_with_mqa(hidden_states).split([V32.latent, V32.rope], dim=-1)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], *position_embeddings)
    absorbed = torch.einsum("bhtn,hnl->bthl", q_nope, _up(module)[0])
    query = torch.cat([absorbed, q_rope.transpose(1, 2)], dim=-1)
    return Projected(query.flatten(0, 1), module.kv_a_layernorm(latent).flatten(0, 1), k_rope.flatten(0, 2), q_resid)


def project_back(module: Any, out: torch.Tensor) -> torch.Tensor:
    """The hidden states [N, hidden] of attention's `out` [N, H, L]: values behind the attention, then o_proj."""
    up_value = _up(module)[1]
    return module.o_proj(torch.einsum("thl,hvl->thv", out.to(up_value.dtype), up_value).flatten(1))


def _up(module: Any) -> tuple[torch.Tensor, ...]:
    """The up-projections of the latent to keys [H, dims, L] and to values."""
    up = module.kv_b_proj.weight.view(module.num_heads, -1, V32.latent)
    return up.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)


def index(
    indexer: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, position_embeddings: Rope
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An indexer's queries [N, I, D], keys [N, D] and unscaled weights [N, I] of N tokens, flat over all texts."""
    rope, rest = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).view(*q_resid.shape[:2], indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden_states))[:, :, None]
    q_parts, k_parts = q.split([rope, rest], dim=-1), k.split([rope, rest], dim=-1)
    q_roped, k_roped = apply_rotary_pos_emb(q_parts[0], k_parts[0], *position_embeddings, unsqueeze_dim=2)
    queries, keys = torch.cat([q_roped, q_parts[1]], dim=-1), torch.cat([k_roped, k_parts[1]], dim=-1)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    return queries.flatten(0, 1), keys.flatten(0, 2), weights.flatten(0, 1)


@dataclass
class SparseAttention(PagedAttention):
    """The forward of a `DeepseekV32Attention`.

    With `writes` False the pools have every entry already, and each token reads the very same bytes. With the keys
    `selected` [T, K] for each token nothing is selected here.
    """

    writes: bool
    selected: torch.Tensor | None = None

    def attend(self, hidden_states: torch.Tensor, position_embeddings: Rope, positions: torch.Tensor) -> torch.Tensor:
        module, mla, indexer = self.module, self.pools["mla"], self.pools["indexer"]
        projected, scale = project(module, hidden_states, position_embeddings), float(module.scaling)
        if self.writes:
            self.call("write_mla_cache", projected.latent, projected.k_rope, mla.slots(positions), mla.pages)
        if self.selected is None:
            index_q, index_k, index_weights = index(
                module.indexer, hidden_states, projected.q_resid, position_embeddings
            )
            if self.writes:
                self.call("write_indexer_cache", index_k, indexer.slots(positions), indexer.pages)
            out, _, indices = self.call(
                "dsa_attention", projected.query, index_q, index_weights, mla.pages, indexer.pages, mla.block_table,
                positions + 1, k=module.config.index_topk, softmax_scale=scale,
            )  # fmt: skip
            self.indices.append(indices)
        else:
            keys = self.selected[positions.long()]
            keys = keys.where(keys <= positions[:, None], -1)  # the model's own, which it masks later
            slots, _ = self.call("map_slots", keys, mla.block_table, page_size=PAGE)
            out, _ = self.call("sparse_mla", projected.query, mla.pages, slots, softmax_scale=scale)
        return project_back(module, out)[None]


def run_replaced(
    model: DeepseekV32ForCausalLM, tokens: torch.Tensor, prompt: int, filled: Run | None = None,
    implementation: str | None = None, selected: Sequence[torch.Tensor | None] | None = None,
) -> Run:  # fmt: skip
    """A pass with `dsa_attention` over paged fp8 caches: new ones, or those that another run of the text `filled`.

    With `selected`, each layer's selection, it is one over plain rows, and nothing is rounded to fp8.
    """
    layout, device = PLAIN if selected else V32, str(tokens.device)
    pools = [_empty_pools(layout, len(tokens), device) for _ in PLACES]
    if filled:
        pools = [layer.pools for layer in filled.layers]
    layers = [
        SparseAttention(module, pool, filled is None, keys, implementation=implementation)
        for module, pool, keys in zip(attentions(model), pools, selected or [None] * len(PLACES), strict=True)
    ]
    return run_with(model, layers, tokens, prompt)


def _empty_pools(layout: MlaLayout, tokens: int, device: str) -> dict[str, Pool]:
    """Empty pools of latent entries and of the indexer's keys, which have the same block table."""
    dtype = torch.uint8 if layout.packed else torch.bfloat16
    indexer = Pool.empty(tokens, PAGE, IndexerLayout(128).row, torch.uint8, device)
    return {"mla": Pool.empty(tokens, PAGE, layout.row, dtype, device), "indexer": indexer}


def compare(
    model: DeepseekV32ForCausalLM, tokens: torch.Tensor, shipped: Run, begin: Callable[[str], None]
) -> Comparison:
    """Figures of xmla against the reference on the same caches, against the model, against JAX, and at real sizes."""
    prompt = shipped.prompt
    begin("xmla")
    ours = run_replaced(model, tokens, prompt)
    begin("reference")
    reference = run_replaced(model, tokens, prompt, ours, implementation="reference")
    begin("comparing")
    figures: list[Figure] = []
    for layer, where in zip(ours.layers, PLACES, strict=True):
        figures += against_reference(layer, where, "same caches", prompt, BOUNDS)
    figures += errors("logits, same caches", "", ours.logits, reference.logits, prompt, BOUNDS)
    begin("plain rows")
    plain = run_replaced(model, tokens, prompt, selected=shipped.indices)
    figures += against_model(plain, shipped, "plain rows", PLACES, BOUNDS)
    figures += against_model(ours, shipped, "as shipped", PLACES, BOUNDS)
    if not missing("jax"):
        begin("JAX")
        figures += parity(ours)
    tables = []
    if tokens.is_cuda:
        from xmla.demo.real_sizes import measure

        begin("real sizes")
        agreement, times = measure(BOUNDS)
        figures += agreement
        tables.append(times)
    return Comparison(ours, plain, figures, tables)


def parity(run: Run) -> Iterator[Figure]:
    """JAX's results of the first and the last call, and the first layer's caches, bit for bit."""
    first, last = run.layers
    for where, step in (("layer 0, prefill", first.steps[0]), ("layer 1, decode", last.steps[-1])):
        call = step[-1]  # after those that write
        for name, ours, theirs in zip(registry()[call.op].outputs, call.results, by_jax(call), strict=True):
            yield identical(f"torch = JAX: {name}", where, ours, theirs)
    pages = [pool.pages for pool in first.pools.values()]
    yield identical("torch = JAX: cache bytes", "layer 0", flatten(pages), flatten(written_by_jax(first)))
