"""What vLLM's DeepSeek-V4.1 calls of packages that tests do without, in torch.

mHC is its reference, and of the experts the shared ones alone run, as in `replaced_v4`.
"""

from typing import Any

import torch
from torch.nn.functional import rms_norm

from benchmarks.engines.vllm import replaced_v4

Tensor = torch.Tensor


def install() -> None:
    """Replace what needs a GPU in this process, before the model is made, which is the one of text alone."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch
    from vllm.model_executor.models import ModelRegistry
    from vllm.models.deepseek_v41.nvidia import dspark, model

    replaced_v4.without_routed_experts(model)
    model.DeepseekV41LLMForCausalLM.set_moe_parameters = lambda self: None
    model.mhc_pre_delayed_tilelang, model.mhc_shifted_post_pre = mhc_pre, mhc_post_pre
    for module in (model, dspark):
        module.mhc_post_tilelang, module.hc_collapse_triton = mhc_post_torch, collapse
    dspark.fused_moe_make_expert_params_mapping = lambda *_, **__: []
    ModelRegistry.register_model("DeepseekV41ForCausalLM", model.DeepseekV41LLMForCausalLM)


def mhc_pre(
    residual: Tensor, *coefficients: Any, norm_weight: Tensor, norm_eps: float, **mixed: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_delayed_torch

    post, mix, x, pre = mhc_pre_delayed_torch(residual, *coefficients, **mixed)
    return post, mix, rms_norm(x, norm_weight.shape, norm_weight, norm_eps), pre


def mhc_post_pre(
    x: Tensor, residual: Tensor, post: Tensor, mix: Tensor, *coefficients: Any, pre_mix: Tensor, norm_weight: Tensor,
    norm_eps: float, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    residual = mhc_post_torch(x, residual, post, mix)
    mixed = mhc_pre(residual, *coefficients, pre_mix=pre_mix, norm_weight=norm_weight, norm_eps=norm_eps)
    return residual, *mixed, residual.mean(dim=1)


def collapse(streams: Tensor, mix: Tensor) -> Tensor:
    return (mix[..., None] * streams.float()).sum(1).to(streams.dtype)
