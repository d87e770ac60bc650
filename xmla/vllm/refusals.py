"""What the plugin does not serve is refused at start: vLLM's own kernels cannot take over in the middle of a model."""

import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from xmla.core.config import settings
from xmla.core.errors import UnsupportedError
from xmla.core.values import MIN_E4M3_ARCH
from xmla.vllm.contract import OTHERWISE

# Architectures, by vLLM's names, of which one was tried, or whose layers are those of one: what vLLM builds of V3.2's
# layers, and those that have attention of their own here.
SERVED = frozenset((
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM", "Glm4MoeLiteForCausalLM",
    "MistralLarge3ForCausalLM", "HYV4ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM", "Glm5NextForCausalLM", "Glm5NextForConditionalGeneration",
))  # fmt: skip
FP4_ENTRIES = "nvfp4_ds_mla"
KEY_DIMS = 128  # of the indexer's keys, which share a scale


def refuse(reasons: Mapping[str, bool]) -> None:
    """Raise UnsupportedError with those of `reasons` that are true."""
    unserved = [reason for reason, there in reasons.items() if there]
    if unserved:
        raise UnsupportedError(f"xmla.vllm: not served: {', '.join(unserved)}; {OTHERWISE}")


def unserved(config: Any) -> dict[str, bool]:
    """What an engine's configuration asks of the indexer and xmla's does not do; nothing of models without one.

    The indexer is xmla's whatever backend of attention the user names.
    """
    model, attention, parallel = config.model_config.hf_text_config, config.attention_config, config.parallel_config
    if not has_indexer(config):
        return {}
    invariant, architecture = is_batch_invariant(), config.model_config.architecture
    dims = getattr(model, "index_head_dim", KEY_DIMS)
    fp4, named = has_fp4_entries(config), getattr(attention.backend, "name", "CUSTOM")
    of_drafts = getattr(config.speculative_config, "kv_cache_dtype", None) or config.cache_config.cache_dtype
    return {
        # Its layers may take attention of their own beside xmla's indexer, as Dots3-Note's do.
        f"the architecture {architecture}": architecture not in SERVED,
        # vLLM quantises so many together, in an assertion of the first step.
        f"keys of the indexer of {dims} dims": dims != KEY_DIMS,
        # The other node may have vLLM's own kernels, and a store what these wrote: vLLM compares backends' names alone.
        # Where its keys have scales of their own, so have its entries.
        "kv_transfer_config of DeepSeek-V4.1 on this GPU, where vLLM's own kernels store entries of 528 bytes and "
        "xmla's of 584": config.kv_transfer_config is not None
        and model.model_type == "deepseek_v41"
        and key_format() != "fp8",
        "decode context parallelism of pooled keys": pool_size(config) > 1
        and parallel.decode_context_parallel_size > 1,
        # The writers that `patches` changes for them, of other releases, were not looked at.
        "nvfp4_ds_mla before vLLM 0.33": fp4 and Version(version("vllm")) < Version("0.33"),
        # No release has entries of V4 in it.
        "nvfp4_ds_mla of DeepSeek-V4": fp4 and model.model_type == "deepseek_v4",
        # `patches` changes writers for all layers or for none.
        "nvfp4_ds_mla for the caches of drafts alone, or of all but drafts": (of_drafts == FP4_ENTRIES) != fp4,
        # Of V4 vLLM itself says nothing. Of V3.2 it would read a cache from elsewhere.
        "HiSparse": getattr(attention, "hisparse_config", None) is not None,
        # vLLM's op for these, not `sparse_attn_indexer`. It has the option since 0.33.
        "logits of DeepSeek-V4.1's blocks alone (indexer_sparse_logits)": getattr(
            attention, "indexer_sparse_logits", False
        ),
        # `patches` takes vLLM's own refusal away, whose kernels read these entries on sm_100 alone, where keys have
        # scales of their own.
        "nvfp4_ds_mla of DeepSeek-V4.1 on this GPU with vLLM's own attention": fp4
        and model.model_type == "deepseek_v41"
        and named != "CUSTOM"
        and key_format() == "fp8",
        # Its entries of 288 bytes have windows of 528 beside them, where `patches` makes vLLM store V4's.
        "FLASHMLA_MEGA_ATTN_DSV41": named == "FLASHMLA_MEGA_ATTN_DSV41",
        # The layers that `patches` changes for them, of other releases, were not looked at.
        "MXFP4 keys of the indexer before vLLM 0.33": has_fp4_keys(config)
        and Version(version("vllm")) < Version("0.33"),
        # vLLM's kernels write them, in e4m3 alone.
        "MXFP4 keys of pools": has_fp4_keys(config) and pool_size(config) > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "two micro-batches at once": parallel.use_ubatching,
        # Whether a step's prefills take vLLM's dense attention depends on the longest. V4 has none.
        "VLLM_BATCH_INVARIANT=1 without sparse_mla_force_mqa": invariant
        and not attention.sparse_mla_force_mqa
        and model.model_type != "deepseek_v4",
        "VLLM_BATCH_INVARIANT=1 before vLLM 0.33": invariant and Version(version("vllm")) < Version("0.33"),
        # Its gate takes another kernel for up to 16 tokens, and nobody has looked at the bits of its experts.
        "VLLM_BATCH_INVARIANT=1 with moe_backend=deep_gemm_mega_moe": invariant
        and getattr(config.kernel_config, "moe_backend", "") == "deep_gemm_mega_moe",
        # Windows of these layers, and after a cached prefix those of all, begin where the computed tokens do.
        "VLLM_BATCH_INVARIANT=1 of DeepSeek-V4.1, whose last layers vLLM computes for the last tokens of a step's "
        "requests alone": invariant and model.model_type == "deepseek_v41",
        "VLLM_BATCH_INVARIANT=1 of GLM-5.3-Flash, whose linear attention vLLM has not in this mode": invariant
        and pool_size(config) > 1,
        # vLLM's writers of them are not among what `without_e4m3` replaces.
        "pooled keys on a GPU without e4m3": pool_size(config) > 1 and not has_e4m3(),
    } | unrecorded(config)


def unrecorded(config: Any) -> dict[str, bool]:
    """What is asked of an engine whose selections are to be recorded, and is not done; nothing where they are not."""
    if not settings.selections_gib:
        return {}
    reasons = {
        "before vLLM 0.33": Version(version("vllm")) < Version("0.33"),
        "of DeepSeek-V4": config.model_config.hf_text_config.model_type.startswith("deepseek_v4"),
        "of pooled keys": pool_size(config) > 1,
        # A rank has the slots of its own keys alone.
        "with decode context parallelism": config.parallel_config.decode_context_parallel_size > 1,
        # Pages that come from elsewhere have no rows.
        "with kv_transfer_config": config.kv_transfer_config is not None,
    }
    return {f"recorded selections (XMLA_SELECTIONS_GIB) {reason}": there for reason, there in reasons.items()}


def has_e4m3() -> bool:
    """Whether vLLM's own kernels can quantise to e4m3: not on sm_80 and sm_86."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is None or capability.to_int() >= MIN_E4M3_ARCH


def has_indexer(config: Any) -> bool:
    """Whether the model has attention to selected keys."""
    return getattr(config.model_config.hf_text_config, "index_topk", None) is not None


def key_format() -> str:
    """The format in which vLLM's own writers store the indexer's keys on this GPU: since 0.33 another on sm_100."""
    from vllm.utils import deep_gemm

    asked = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    return "fp8_ue8m0" if asked is not None and asked() else "fp8"


def has_fp4_entries(config: Any) -> bool:
    """Whether attention's entries, but for drafts', are those of the cache dtype `nvfp4_ds_mla`."""
    return config.cache_config.cache_dtype == FP4_ENTRIES


def has_fp4_keys(config: Any) -> bool:
    """Whether the user asks for keys of the indexer in MXFP4: 0.26 has a switch of its own for them."""
    attention = config.attention_config
    return attention.indexer_kv_dtype == "mxfp4" or getattr(attention, "use_fp4_indexer_cache", False)


def pool_size(config: Any) -> int:
    """Tokens that a key of the indexer stands for, as GLM-5.3-Flash pools them; 1 in other models."""
    return getattr(config.model_config.hf_text_config, "index_kpool", None) or 1


def is_batch_invariant() -> bool:
    """Whether the user asks for a token's bits to be the same whatever else is in a step."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def unused(config: Any) -> str | None:
    """The user's choice of vLLM's kernel for top-k, which xmla's selection leaves without effect."""
    chosen = getattr(config.kernel_config, "sparse_indexer_topk_backend", "auto")  # since 0.33
    return f"sparse_indexer_topk_backend={chosen}" if has_indexer(config) and chosen != "auto" else None
