"""Modules of vLLM in CuTe DSL, for GPUs where it is not installed: what they are asked for is Triton's."""

import sys
from types import ModuleType
from typing import Any


def install() -> None:
    """Replace CuTe DSL's kernels in this process, before the model is made."""
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton

    def compress(store_full_kv: bool, store_full_fp8: bool, fp8_scale: None, **call: Any) -> None:
        assert not (store_full_kv or store_full_fp8)
        compress_norm_rope_store_triton(**call)

    # The compressor of DeepSeek-V4's entries, by 0.26's name and by 0.33's.
    names = "compress_norm_rope_store_cutedsl", "_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL"
    replace("deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl", dict.fromkeys(names, compress))
    # The queries of DeepSeek-V3.2 in 0.33, which asks whether the kernel serves them.
    queries = {"fused_q_cutedsl": None, "is_fused_q_cutedsl_supported": lambda *_, **__: False}
    replace("deepseek_v32.nvidia.ops.fused_q_cutedsl", queries)


def replace(name: str, values: dict[str, Any]) -> None:
    module = ModuleType(f"vllm.models.{name}")
    vars(module).update(values)
    sys.modules[module.__name__] = module
