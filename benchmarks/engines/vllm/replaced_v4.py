"""What vLLM's DeepSeek-V4 calls of packages that tests do without, in torch or by vLLM's own Triton kernels.

mHC is its reference instead of tilelang's kernels, of the experts the shared ones alone run, and the output's
projection has bfloat16 weights.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch.nn.functional import rms_norm

Tensor = torch.Tensor


def install() -> None:
    """Replace what needs a GPU in this process, before the model is made."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch
    from vllm.models.deepseek_v4.nvidia import flashmla, model, mtp

    if Version(version("vllm")) < Version("0.31"):
        flashmla.DeepseekV4FlashMLAAttention._o_proj = output_projection
    without_routed_experts(model)
    model.DeepseekV4ForCausalLM.set_moe_parameters = lambda self: None
    model.mhc_pre_tilelang, model.mhc_pre_broadcast_tilelang = mhc_pre, mhc_pre_broadcast
    model.mhc_fused_post_pre_tilelang = mhc_fused_post_pre
    mtp.fused_moe_make_expert_params_mapping = lambda *_, **__: []
    drafters = [mtp]
    if Version(version("vllm")) >= Version("0.33"):
        from vllm.models.deepseek_v4.nvidia import dspark

        drafters.append(dspark)
        dspark.fused_moe_make_expert_params_mapping = lambda *_, **__: []
        dspark.DSparkDeepseekV4ForCausalLM.set_moe_parameters = lambda self: None
    for module in (model, *drafters):
        module.mhc_post_tilelang, module.hc_head_fused_kernel_tilelang = mhc_post_torch, hc_head


def without_routed_experts(model: Any) -> None:
    model.DeepseekV4MoE = shared_experts()
    model.DeepseekV4Model.get_expert_mapping = lambda self: []
    load = model.DeepseekV4Model.load_weights
    model.DeepseekV4Model.load_weights = lambda self, weights: load(self, without_experts(weights))


def output_projection(self: Any, o: Tensor, positions: Tensor) -> Tensor:
    """`_o_proj` of bfloat16 weights, which before 0.31 is for fp8 alone: inverse rotation, a product for each group."""
    pairs = o[..., self.nope_head_dim :].float().unflatten(-1, (-1, 2))
    cos, sin = self.rotary_emb.cos_sin_cache[positions].float()[:, None].chunk(2, dim=-1)
    even, odd = pairs.unbind(-1)
    rotated = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1).flatten(-2)
    o = torch.cat((o[..., : self.nope_head_dim], rotated.to(o.dtype)), dim=-1)
    grouped = o.reshape(len(o), self.n_local_groups, -1).transpose(0, 1)
    z = grouped @ self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1).transpose(1, 2)
    return self.wo_b(z.transpose(0, 1).flatten(1))


def shared_experts() -> type:
    from vllm.models.deepseek_v4.nvidia.model import DeepseekV4MLP

    class SharedExperts(torch.nn.Module):
        experts, use_native_mega_moe, use_mega_moe, n_redundant_experts = None, False, False, 0

        def __init__(self, vllm_config: Any, prefix: str = "", **_: Any) -> None:
            super().__init__()
            config = vllm_config.model_config.hf_config
            self.shared_experts = DeepseekV4MLP(
                config.hidden_size, config.moe_intermediate_size, config.hidden_act, config.swiglu_limit,
                prefix=f"{prefix}.shared_experts",
            )  # fmt: skip

        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return self.shared_experts(x)

        def finalize_mega_moe_weights(self) -> None:
            """0.26 asks for it."""

    return SharedExperts


def without_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights by the checkpoint's names, without experts': transformers saves some under others."""
    for name, weight in weights:
        if ".experts." not in name and ".gate." not in name:
            yield name.replace(".attn.norm.", ".attn.kv_norm.").replace("hc_head.hc_", "hc_head_"), weight


def mhc_pre(
    residual: Tensor, *coefficients: Any, norm_weight: Tensor, norm_eps: float, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    post, mix, x = mhc_pre_torch(residual, *coefficients)
    return post, mix, rms_norm(x, norm_weight.shape, norm_weight, norm_eps)


def mhc_pre_broadcast(x: Tensor, fn: Tensor, *coefficients: Any, **norm: Any) -> tuple[Tensor, ...]:
    residual = x[:, None].repeat(1, fn.shape[1] // x.shape[1], 1)
    return residual, *mhc_pre(residual, fn, *coefficients, **norm)


def mhc_fused_post_pre(
    x: Tensor, residual: Tensor, post: Tensor, mix: Tensor, *coefficients: Any, **norm: Any
) -> tuple[Tensor, ...]:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    residual = mhc_post_torch(x, residual, post, mix)
    return residual, *mhc_pre(residual, *coefficients, **norm)


def hc_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, hc_eps: float) -> Tensor:
    x = streams.float()
    mix = rms_norm(x.flatten(1), (fn.shape[1],), eps=rms_eps) @ fn.T
    weights = torch.sigmoid(mix * scale + base) + hc_eps
    return (weights[..., None] * x).sum(1).to(streams.dtype)
