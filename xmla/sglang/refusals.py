"""What the plugin does not serve is refused at start: SGLang's own kernels cannot take over inside a model."""

from collections.abc import Mapping
from typing import Any

from xmla.core.errors import UnsupportedError

# Architectures of V3.2's layers, whose attention is over rows of 512 dims and maybe 64 roped ones, by the first of
# SGLang's names for them in config.json.
SERVED = frozenset((
    "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM",
    "LongcatFlashForCausalLM", "MistralLarge3ForCausalLM", "PixtralForConditionalGeneration",
))  # fmt: skip
DRAFTS = "NextN"  # behind the name of the model that a layer drafts for
KEY_DIMS = 128  # of the indexer's keys, which share a scale


def refuse(reasons: Mapping[str, bool]) -> None:
    """Raise UnsupportedError with those of `reasons` that are true."""
    unserved = [reason for reason, there in reasons.items() if there]
    if unserved:
        raise UnsupportedError(
            f"xmla.sglang: not served: {', '.join(unserved)}; without xmla in SGLANG_PLUGINS SGLang serves with its "
            "own kernels"
        )


def other_keys(config: Any) -> dict[str, bool]:
    """Keys of the indexer of other dims, of which SGLang stores one scale for each 128."""
    dims = getattr(config.hf_config, "index_head_dim", KEY_DIMS)
    return {f"keys of the indexer of {dims} dims": dims != KEY_DIMS}


def unserved(config: Any) -> dict[str, bool]:
    """What a model of the backend "dsa", by SGLang's `ModelConfig`, and the user's options ask for."""
    from sglang.srt.configs.model_config import get_dsa_index_kpool
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec, get_memory, get_parallel

    parallel, (architecture, *_) = get_parallel(), config.hf_config.architectures
    recorded = "--enable-return-indexer-topk without"
    dims = config.kv_lora_rank, config.qk_rope_head_dim
    records, threshold = get_exec().features.enable_return_indexer_topk, "DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"
    return {
        f"the architecture {architecture}": architecture.removesuffix(DRAFTS) not in SERVED,
        f"entries of {dims[0]} latent and {dims[1]} roped dims": dims not in ((512, 64), (512, 0)),
        # SGLang selects pools by kernels of its own, and attends to them by others than the backends that it names.
        "pooled keys of the indexer (index_kpool)": get_dsa_index_kpool(config.hf_config) > 1,
        "HiSparse": get_memory().enable_hisparse,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.dcp_size > 1,
        # SGLang records what its attention reads: slots of the pool, which later requests have too.
        f"{recorded} SGLANG_DSA_FUSE_TOPK=0": records and envs.SGLANG_DSA_FUSE_TOPK.get(),
        # Of prefills that its dense attention takes it records nothing.
        f"{recorded} SGLANG_{threshold}=0": records and getattr(envs, f"SGLANG_{threshold}").get() > 0,
    } | other_keys(config)


def unserved_v4(config: Any) -> dict[str, bool]:
    """What a model of DeepSeek-V4's architecture, by SGLang's `ModelConfig`, and the user's options ask for."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsv4.sparse_prefill_utils import use_dsv4_q8kv8_sparse_prefill
    from sglang.srt.runtime_context import get_exec, get_memory, get_parallel, get_platform, get_spec

    kernel, parallel, layout = get_exec().kernel, get_parallel(), envs.SGLANG_DSV4_KV_LAYOUT.get()
    # SGLang's names of other logits than DeepGEMM's, and of its own compressor.
    options = (
        "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "SGLANG_OPT_USE_TILELANG_INDEXER", "SGLANG_OPT_USE_AITER_INDEXER",
        "SGLANG_OPT_USE_ONLINE_COMPRESS",
    )  # fmt: skip
    return {
        # Its entries are of one token and of two, its indexer's keys are MXFP4, which it selects in blocks.
        "DeepSeek-V4.1": config.hf_config.model_type == "deepseek_v41",
        "DeepSeek-V4 on other GPUs than Nvidia's": not get_platform().is_cuda,
        "DeepSeek-V4 on sm_120": get_platform().is_sm120,  # by kernels of its own, with pages of another size
        f"--dsv4-attn-backend {kernel.dsv4_attn_backend}": kernel.dsv4_attn_backend not in ("auto", "flashmla"),
        "--dsv4-prefill-backend flashmla_sparse_q8": use_dsv4_q8kv8_sparse_prefill(kernel.dsv4_prefill_backend),
        f"--dsa-topk-backend {kernel.dsa_topk_backend} of DeepSeek-V4": kernel.dsa_topk_backend != "sgl-kernel",
        "--enable-deepseek-v4-fp4-indexer": kernel.enable_deepseek_v4_fp4_indexer,
        "DSpark": get_spec().speculative_algorithm == "DSPARK",  # windows are wider by what is drafted
        "HiSparse of DeepSeek-V4": get_memory().enable_hisparse,
        "context parallelism of DeepSeek-V4": parallel.attn_cp_size > 1 or parallel.dcp_size > 1,
        # Entries of 528 bytes, which SGLang has on sm_100 alone: no kernel of them is warmed up.
        f"SGLANG_DSV4_KV_LAYOUT={layout}": layout.lower()
        not in (("v4",) if get_platform().is_sm100 else ("v4", "auto")),
        **{f"{name}=1": getattr(envs, name).get() for name in options},
    } | other_keys(config)
