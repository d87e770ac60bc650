"""What vLLM's DeepSeek-V4 calls of kernels for CUDA, in torch or by vLLM's own Triton kernels for other devices."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.functional import rms_norm

Tensor = torch.Tensor
FUSED_INSERT = (
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(Tensor(a!) q, Tensor kv, Tensor(b!) cache, Tensor slots, "
    "Tensor positions, Tensor cos_sin, int heads, float eps, int page_size) -> Tensor"
)


def install() -> None:
    """Let a worker on a CPU serve the model of GPUs. Its experts are the shared ones alone."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models import ModelRegistry
    from vllm.models.deepseek_v4 import attention
    from vllm.models.deepseek_v4.nvidia import model, mtp

    _custom_ops.fused_indexer_q_rope_quant_cpu = quantize_queries
    torch.cuda.is_current_stream_capturing = lambda: False
    ModelRegistry.register_model("DeepseekV4ForCausalLM", model.DeepseekV4ForCausalLM)
    ModelRegistry.register_model("DeepSeekV4MTPModel", mtp.DeepSeekV4MTP)
    utils._MODEL_ARCH_BY_HASH.clear()  # a config of drafts has asked for the model already
    attention.DeepseekV4Attention._run_parallel_input_projections = input_projections
    attention.execute_in_parallel = lambda first, others, *_, **__: (first(), [other() for other in others])
    attention.maybe_execute_in_parallel = lambda first, second, *_: (first(), second())
    model.DeepseekV4MoE, model.collect_moe_layers = shared_experts(model), lambda *_, **__: None
    model.DeepseekV4Model.get_expert_mapping = lambda self: []
    load = model.DeepseekV4Model.load_weights
    model.DeepseekV4Model.load_weights = lambda self, weights: load(self, without_experts(weights))
    model.mhc_pre_tilelang, model.mhc_pre_broadcast_tilelang = mhc_pre, mhc_pre_broadcast
    model.mhc_fused_post_pre_tilelang = mhc_fused_post_pre
    mtp.fused_moe_make_expert_params_mapping = lambda *_, **__: []
    for module in (model, mtp):
        module.mhc_post_tilelang, module.hc_head_fused_kernel_tilelang = mhc_post_torch, hc_head


def input_projections(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`_run_parallel_input_projections`: on a CPU `torch.mm` has no other dtype for its result."""
    indexer, compressor = self.indexer, self.compressor
    wide, keys = (owner and owner.fused_wkv_wgate for owner in (compressor, indexer and indexer.compressor))
    scores = [layer and x.float() @ layer.weight.float().T for layer in (wide, keys)]
    return self._fused_wqa_wkv_gemm(x), *scores, indexer and indexer.weights_proj(x)[0]


def quantize_queries(
    positions: Tensor, q: Tensor, cos_sin: Tensor, q8: Tensor, weights: Tensor, scale: float, head_scale: float,
    scaled: Tensor,
) -> None:  # fmt: skip
    """The indexer's queries, by vLLM's Triton kernel instead of the one for CPUs."""
    from vllm.models.deepseek_v4.common.ops.fused_indexer_q import _FUSED_INDEXER_Q_ROPE_QUANT_TRITON_KERNEL as KERNEL

    KERNEL(positions, q, cos_sin, weights, scale, head_scale, q8, scaled, fp8_max=448.0, use_fnuz=False)


def fused_insert(
    q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, cos_sin: Tensor, heads: int, eps: float,
    page_size: int,
) -> Tensor:  # fmt: skip
    """The kernel that rotates queries and writes the window's cache, by vLLM's Triton kernels for another device."""
    from vllm.models.deepseek_v4.xpu.xpu_qnorm_rope_kv_fp8_insert import xpu_qnorm_rope_kv_fp8_insert

    assert heads == q.shape[1]
    xpu_qnorm_rope_kv_fp8_insert(q, kv, cache, slots, positions, cos_sin, eps, page_size)
    return q


def shared_experts(model: Any) -> type:
    class SharedExperts(torch.nn.Module):
        experts, use_native_mega_moe = None, False

        def __init__(self, vllm_config: Any, prefix: str = "", **_: Any) -> None:
            super().__init__()
            config = vllm_config.model_config.hf_config
            self.shared_experts = model.DeepseekV4MLP(
                config.hidden_size, config.moe_intermediate_size, config.hidden_act, config.swiglu_limit,
                prefix=f"{prefix}.shared_experts",
            )  # fmt: skip

        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return self.shared_experts(x)

    return SharedExperts


def without_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """By the checkpoint's names: transformers saves some under others."""
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
