"""A layer of DeepSeek sparse attention in PyTorch: projections, rope, indexer, paged fp8 caches, xmla's ops.

python examples/torch_dsa_layer.py

The module has the parameters of transformers' `deepseek_v32` attention, by its names. Where transformers is installed
the layer loads a state_dict of it and is compared with it: a prompt in one call, then one token per call.
"""

import os
from dataclasses import dataclass
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted

import torch
from torch import Tensor, nn

from xmla import torch_api as xt

PAGE_SIZE = 64


@dataclass(frozen=True)
class Config:
    """Sizes of a layer, by the names of transformers' DeepseekV32Config."""

    hidden_size: int = 256
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class Caches:
    """One layer's pools, and who owns which page: pages in any order."""

    def __init__(self, requests: int, tokens: int, device: str) -> None:
        pages = -(-tokens // PAGE_SIZE)
        pool = (requests * pages, PAGE_SIZE)
        self.mla = torch.zeros(*pool, 656, dtype=torch.uint8, device=device)
        self.indexer = torch.zeros(*pool, 132, dtype=torch.uint8, device=device)
        order = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0))
        self.block_table = order.view(requests, pages).to(device, torch.int32)


def angles(position: Tensor, dims: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, dims / 2] of each pair's angle at `position` [T]."""
    frequency = theta ** (-torch.arange(0, dims, 2, device=position.device, dtype=torch.float32) / dims)
    angle = position.float()[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(first: Tensor, second: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """The pairs (first, second) [T, heads, dims / 2] rotated; all first ones stand before all second ones."""
    cos, sin = (each.to(first.dtype) for each in rope)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Indexer(nn.Module):
    """Queries, keys and head weights of the lightning indexer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rope, self.heads = config.qk_rope_head_dim, config.index_n_heads
        self.wq_b = nn.Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, config.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, config.index_n_heads, bias=False)

    def forward(self, x: Tensor, q_resid: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, I, D], keys [T, D] and weights [T, I] in float32, as `dsa_attention` takes them."""
        q, k = self.wq_b(q_resid).unflatten(-1, (self.heads, -1)), self.k_norm(self.wk(x))[:, None]
        q, k = (self.roped(each, rope) for each in (q, k))
        return q, k[:, 0], self.weights_proj(x).float()

    def roped(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The first dims rotated, in pairs of halves."""
        first, second, rest = x.split([self.rope // 2, self.rope // 2, x.shape[-1] - self.rope], dim=-1)
        return torch.cat([rotate(first, second, rope), rest], dim=-1)


class SparseAttention(nn.Module):
    """Multi-head latent attention with DeepSeek's sparse indexer, the up-projection of the latent absorbed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.config = config
        self.softmax_scale = (nope + rope) ** -0.5  # DeepSeek-V3.2 as released: xmla.ModelConfig().softmax_scale
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.kv_lora_rank + rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (nope + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)
        self.indexer = Indexer(config)

    def forward(self, x: Tensor, position: Tensor, caches: Caches) -> Tensor:
        """Store the keys of new tokens x [T, hidden], T / B of each request, and attend with them: [T, hidden].

        `position` [T] i32 is each token's place in its request; the keys before it are in the caches.
        """
        config, requests = self.config, len(caches.block_table)
        slots, _ = xt.map_slots(position.view(requests, -1), caches.block_table, page_size=PAGE_SIZE)
        rope = angles(position, config.qk_rope_head_dim, config.rope_theta)

        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).unflatten(-1, (config.num_attention_heads, -1))
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        q_rope, k_rope = (rotate(v[..., ::2], v[..., 1::2], rope) for v in (q_rope, k_rope[:, None]))

        up = self.kv_b_proj.weight.unflatten(0, (config.num_attention_heads, -1))  # [H, dims, 512]
        up_key, up_value = up.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        query = torch.cat([torch.einsum("thn,hnl->thl", q_nope, up_key), q_rope], dim=-1)  # [T, H, 576]

        index_q, index_k, index_weights = self.indexer(x, q_resid, rope)
        xt.write_mla_cache(self.kv_a_layernorm(latent), k_rope[:, 0], slots.flatten(), caches.mla)
        xt.write_indexer_cache(index_k, slots.flatten(), caches.indexer)
        out, _, _ = xt.dsa_attention(
            query, index_q, index_weights, caches.mla, caches.indexer, caches.block_table, position + 1,
            k=config.index_topk, softmax_scale=self.softmax_scale,
        )  # fmt: skip
        return self.o_proj(torch.einsum("thl,hvl->thv", out.to(x.dtype), up_value).flatten(1))


@torch.no_grad()
def run(layer: SparseAttention, x: Tensor, prompt: int) -> Tensor:
    """One request: the prompt in one call, then one token per call. Outputs [T, hidden]."""
    caches = Caches(1, len(x), str(x.device))
    position = torch.arange(len(x), dtype=torch.int32, device=x.device)
    cuts = [(0, prompt), *((t, t + 1) for t in range(prompt, len(x)))]
    return torch.cat([layer(x[first:end], position[first:end], caches) for first, end in cuts])


@torch.no_grad()
def by_transformers(layer: SparseAttention, x: Tensor) -> Tensor:
    """A small random `deepseek_v32` attention in float32 on x [T, hidden], and its weights in the layer."""
    from xmla.demo.deepseek_v32 import build

    model = build(str(x.device)).float()
    module = model.model.layers[0].self_attn
    layer.load_state_dict(module.state_dict())
    hidden, position = x.float()[None], torch.arange(len(x), device=x.device)[None]
    mask = torch.full((len(x), len(x)), -torch.inf, device=x.device).triu(1)[None, None]
    rope = model.model.rotary_emb(hidden, position)
    return module(hidden, position_embeddings=rope, attention_mask=mask, position_ids=position)[0][0]


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, prompt = 36, 33
    layer = SparseAttention(Config()).to(device, torch.bfloat16)
    x = torch.randn(tokens, layer.config.hidden_size, device=device).bfloat16()
    try:
        want = by_transformers(layer, x)
    except ImportError:
        print(f"out {tuple(run(layer, x, prompt).shape)}")
        return
    out = run(layer, x, prompt)
    error = (out.float() - want).norm(dim=1) / want.norm(dim=1)
    # e4m3 rounds a latent by up to 1 / 16. A token that sees more than K keys may select others than float32 scores
    # do, where two keys all but tie.
    others = int((error > 0.05).sum())
    print(
        f"out {tuple(out.shape)}: relative difference to transformers {error.median():.4f}, {others} of {tokens} "
        "tokens selected other keys"
    )
    assert others <= tokens // 10 and error[: layer.config.index_topk].max() < 0.05


if __name__ == "__main__":
    main()
