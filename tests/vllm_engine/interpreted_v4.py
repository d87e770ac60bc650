"""What vLLM's DeepSeek-V4 calls of kernels for CUDA, in torch or by vLLM's own Triton kernels for other devices."""

import sys
from importlib.metadata import version
from typing import Any
from unittest.mock import MagicMock

import torch
from packaging.version import Version

from benchmarks.engines.vllm import replaced_v4
from xmla.vllm.refusals import is_batch_invariant

Tensor = torch.Tensor
FUSED_INSERT = (
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(Tensor(a!) q, Tensor kv, Tensor(b!) cache, Tensor slots, "
    "Tensor positions, Tensor cos_sin, int heads, float eps, int page_size) -> Tensor"
)

# 0.27 and 0.28 have memory for its result.
FUSED_INSERT_OUT = (
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_out(Tensor q, Tensor kv, Tensor(a!) out, Tensor(b!) cache, "
    "Tensor slots, Tensor positions, Tensor cos_sin, int heads, float eps, int page_size) -> ()"
)


def kernels() -> dict[str, Any]:
    """What stands in for kernels, by their schemas."""
    return {FUSED_INSERT: fused_insert, FUSED_INSERT_OUT: fused_insert_out}


def install() -> None:
    """Let a worker on a CPU serve the model of GPUs."""
    from vllm import _custom_ops
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models import ModelRegistry
    from vllm.models.deepseek_v4 import attention
    from vllm.models.deepseek_v4.nvidia import model, mtp

    from xmla.vllm import patches

    replaced_v4.install()
    _custom_ops.fused_indexer_q_rope_quant_cpu = quantize_queries  # 0.33 has one for CPUs
    torch.cuda.is_current_stream_capturing = lambda: False
    ModelRegistry.register_model("DeepseekV4ForCausalLM", model.DeepseekV4ForCausalLM)
    ModelRegistry.register_model("DeepSeekV4MTPModel", mtp.DeepSeekV4MTP)
    if Version(version("vllm")) >= Version("0.33"):
        from vllm.models.deepseek_v4.nvidia import dspark

        ModelRegistry.register_model("DSparkDraftModel", dspark.DSparkDeepseekV4ForCausalLM)
    utils._MODEL_ARCH_BY_HASH.clear()  # a config of drafts has asked for the model already
    attention.DeepseekV4Attention._run_parallel_input_projections = input_projections
    attention.DeepseekV4Attention.attn_gemm_parallel_execute = input_projections  # 0.26's name of it
    attention.execute_in_parallel = lambda first, others, *_, **__: (first(), [other() for other in others])
    attention.maybe_execute_in_parallel = lambda first, second, *_: (first(), second())
    if is_batch_invariant():
        sys.modules["vllm.tilelang_utils"] = MagicMock()  # of kernels that `replaced_v4` replaces
        patches.apply_all(patches.V4_INVARIANCE_PATCHES, version("vllm"))


def input_projections(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The projections of a layer's input: on a CPU `torch.mm` has no other dtype for its result."""
    indexer, compressor = self.indexer, self.compressor
    wide, keys = (owner and owner.fused_wkv_wgate for owner in (compressor, indexer and indexer.compressor))
    scores = [layer and x.float() @ layer.weight.float().T for layer in (wide, keys)]
    return self.fused_wqa_wkv(x)[0], *scores, indexer and indexer.weights_proj(x)[0]


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


def fused_insert_out(q: Tensor, kv: Tensor, out: Tensor, *arguments: Any) -> None:
    out.copy_(fused_insert(q.clone(), kv, *arguments))
