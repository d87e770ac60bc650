"""Hugging Face transformers' own DeepSeek-V3.2 model, and the same model with xmla as its sparse attention."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from xmla import torch_api
from xmla.cli.passes import run_cached, run_with
from xmla.core.layout import V32, IndexerLayout

PAGE_SIZE = 64


def build(device: str) -> DeepseekV32ForCausalLM:
    """A small random model: DeepSeek-V3.2's geometry of the head dims, little of everything else.

    Weights are twice as wide as the default initialisation: at hidden size 256 that one gives attention so flat
    that a wrong selection would hardly show. Both layers have a dense MLP: a random router sends a token to another
    expert for a change in the last bit, which would drown what attention does to the logits.
    """
    settings: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2, "max_position_embeddings": 4096,
        "q_lora_rank": 128, "kv_lora_rank": V32.latent, "qk_rope_head_dim": V32.rope, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 32, "initializer_range": 0.04,
        "pad_token_id": None, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = DeepseekV32ForCausalLM(DeepseekV32Config(**settings))
    return model.to(device=device, dtype=torch.bfloat16).eval()


@dataclass
class Attended:
    """What one layer's attention was asked and answered in one step."""

    arguments: dict[str, Any]
    out: torch.Tensor  # [T, H, L]
    lse: torch.Tensor  # [T, H]
    indices: torch.Tensor  # [T, K]
    projected: torch.Tensor  # [T, hidden], after the output projection


@dataclass
class PagedCaches:
    """One request's caches of one layer, in shuffled pages of a pool in which everything else is NaN."""

    mla: torch.Tensor
    indexer: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, device: str) -> "PagedCaches":
        pages = -(-tokens // PAGE_SIZE)
        shape = (pages + 2, PAGE_SIZE)
        order = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(1))[:pages]
        return cls(
            torch.full((*shape, V32.row), 255, dtype=torch.uint8, device=device),
            torch.full((*shape, IndexerLayout(128).row), 255, dtype=torch.uint8, device=device),
            order.to(device=device, dtype=torch.int32)[None],
        )

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        return self.block_table[0, positions // PAGE_SIZE] * PAGE_SIZE + (positions % PAGE_SIZE).to(torch.int32)


@dataclass
class SparseAttention:
    """The forward of a `DeepseekV32Attention` over paged fp8 caches, with the module's own weights.

    The up-projection of the latent is absorbed: into the query for the scores, behind the attention for the values.
    """

    module: Any
    caches: PagedCaches
    writes: bool
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    steps: list[Attended] = field(default_factory=list)

    def __call__(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor],
        position_ids: torch.Tensor, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        module, caches = self.module, self.caches
        batch, tokens = hidden_states.shape[:2]
        if batch != 1:
            raise ValueError(f"one request at a time, got {batch}")
        positions = position_ids.reshape(-1)
        slots = caches.slots(positions)

        q_resid = module.q_a_layernorm(module.q_a_proj(hidden_states))
        q = module.q_b_proj(q_resid).view(1, tokens, module.num_heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        latent, k_rope = module.kv_a_proj_with_mqa(hidden_states).split([V32.latent, V32.rope], dim=-1)
        latent = module.kv_a_layernorm(latent)
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], *position_embeddings)
        if self.writes:
            torch_api.write_mla_cache(latent[0], k_rope[0, 0].contiguous(), slots, caches.mla)

        up = module.kv_b_proj.weight.view(module.num_heads, -1, V32.latent)
        up_key, up_value = up.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
        absorbed = torch.einsum("htn,hnl->thl", q_nope[0], up_key)
        index_q, index_weights = self._index(hidden_states, q_resid, position_embeddings, slots)
        arguments: dict[str, Any] = {
            "q": torch.cat([absorbed, q_rope[0].transpose(0, 1)], dim=-1),
            "index_q": index_q,
            "index_weights": index_weights,
            "mla_cache": caches.mla,
            "indexer_cache": caches.indexer,
            "block_table": caches.block_table,
            "lengths": (positions + 1).to(torch.int32),
            "k": module.config.index_topk,
            "softmax_scale": float(module.scaling),
        }
        out, lse, indices = self.attend(**arguments)
        values = torch.einsum("thl,hvl->thv", out.to(up_value.dtype), up_value)
        projected = module.o_proj(values.reshape(1, tokens, -1))
        self.steps.append(Attended(arguments, out, lse, indices, projected[0]))
        return projected, None

    def _index(
        self, hidden_states: torch.Tensor, q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Write the tokens' indexer keys; return their indexer queries [T, I, D] and unscaled weights [T, I]."""
        indexer = self.module.indexer
        rope, rest = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
        q = indexer.wq_b(q_resid).view(1, -1, indexer.n_heads, indexer.head_dim)
        k = indexer.k_norm(indexer.wk(hidden_states))[:, :, None]
        q_parts, k_parts = q.split([rope, rest], dim=-1), k.split([rope, rest], dim=-1)
        q_roped, k_roped = apply_rotary_pos_emb(q_parts[0], k_parts[0], *position_embeddings, unsqueeze_dim=2)
        if self.writes:
            keys = torch.cat([k_roped, k_parts[1]], dim=-1)[0, :, 0]
            torch_api.write_indexer_cache(keys, slots, self.caches.indexer)
        weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
        return torch.cat([q_roped, q_parts[1]], dim=-1)[0], weights[0]


@dataclass
class Run:
    """A pass over the text: logits [T, vocab], and per layer what was selected and what attention gave, by token."""

    logits: torch.Tensor
    indices: list[torch.Tensor]  # [T, K] a layer
    attention: list[torch.Tensor]  # [T, hidden] a layer
    steps: list[list[Attended]] = field(default_factory=list)
    caches: list[PagedCaches] = field(default_factory=list)


@torch.no_grad()
def run_as_shipped(model: DeepseekV32ForCausalLM, tokens: torch.Tensor, prompt: int) -> Run:
    """Prefill and token-by-token decode with the model's own attention and cache, watched by hooks."""
    layers = [layer.self_attn for layer in model.model.layers]
    indices: list[list[torch.Tensor]] = [[] for _ in layers]
    attention: list[list[torch.Tensor]] = [[] for _ in layers]
    hooks = []
    for module, picked, given in zip(layers, indices, attention, strict=True):
        hooks.append(module.indexer.register_forward_hook(lambda _m, _a, got, picked=picked: picked.append(got[0])))
        hooks.append(module.register_forward_hook(lambda _m, _a, got, given=given: given.append(got[0][0])))
    logits = run_cached(model, tokens, prompt)
    for hook in hooks:
        hook.remove()
    width = model.config.index_topk
    padded = [torch.cat([nn.functional.pad(i, (0, width - i.shape[1]), value=-1) for i in layer]) for layer in indices]
    return Run(logits, padded, [torch.cat(layer) for layer in attention])


@torch.no_grad()
def run_replaced(
    model: DeepseekV32ForCausalLM, tokens: torch.Tensor, prompt: int, caches: list[PagedCaches] | None = None,
    implementation: str | None = None,
) -> Run:  # fmt: skip
    """The same with `dsa_attention` over paged fp8 caches in place of every layer's attention.

    With `caches`, those of an earlier run over the same text, nothing is written: each token reads the very same bytes.
    """
    layers = [layer.self_attn for layer in model.model.layers]
    attend = _positional(partial(torch_api.dsa_attention, implementation=implementation))
    filled = caches or [PagedCaches.empty(len(tokens), str(tokens.device)) for _ in layers]
    replaced = [SparseAttention(m, c, caches is None, attend) for m, c in zip(layers, filled, strict=True)]
    logits = run_with(model, replaced, tokens, prompt)
    return Run(
        logits,
        [torch.cat([step.indices for step in layer.steps]) for layer in replaced],
        [torch.cat([step.projected for step in layer.steps]) for layer in replaced],
        [layer.steps for layer in replaced],
        filled,
    )


ARRAYS = ("q", "index_q", "index_weights", "mla_cache", "indexer_cache", "block_table", "lengths")


def _positional(attend: Callable[..., Any]) -> Callable[..., Any]:
    def call(k: int, softmax_scale: float, **arrays: torch.Tensor) -> Any:
        return attend(*(arrays[name] for name in ARRAYS), k=k, softmax_scale=softmax_scale)

    return call
