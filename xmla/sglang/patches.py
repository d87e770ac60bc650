"""Every change that the plugin makes to SGLang, each with its reason."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from xmla.compat import deep_gemm
from xmla.core.errors import UnsupportedError
from xmla.sglang import attention, attention_v4, indexer, indexer_v4, scratch, warmup, warmup_v4
from xmla.sglang.refusals import refuse, unserved, unserved_v4

KERNELS = "sglang.srt.layers.attention.dsa.utils"
LOGITS = "sglang.srt.layers.attention.dsa.paged_mqa_logits_backend"
TOPK = "sglang.srt.layers.attention.dsa.dsa_topk_backend"
BACKEND = "sglang.srt.layers.attention.dsa_backend"
POOLS = "sglang.srt.mem_cache.kv_cache_configurator"
BACKEND_V4 = "sglang.srt.layers.attention.deepseek_v4_backend"
INDEXER_V4 = "sglang.srt.layers.attention.dsv4.indexer"
KERNELS_V4 = "sglang.kernels.ops.attention.dsv4"
FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
MODEL_V4 = "sglang.srt.models.deepseek_v4"
OTHERWISE = "SGLang serves with its own kernels"


@dataclass(frozen=True, slots=True)
class Patch:
    """One function of SGLang, and what is called in its place or, for another `hook`, before, after or around it."""

    module: str
    name: str
    function: Callable[..., Any]
    hook: HookType = HookType.REPLACE

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


def prepare(
    self: Any, model_runner: Any, skip_prefill: bool = False, speculative_step_id: int = 0, topk: int = 0,
    speculative_num_steps: int = 0, seed_dsa_topk_from_draft_extend: bool = False,
) -> None:  # fmt: skip
    """Refuse what is not served of V3.2's layers before `DeepseekSparseAttnBackend.__init__`."""
    refuse(unserved(model_runner.model_config))


def prepare_v4(
    self: Any, model_runner: Any, skip_prefill: bool = False, speculative_step_id: int = 0, topk: int = 0,
    speculative_num_steps: int = 0,
) -> None:  # fmt: skip
    """Refuse what is not served of DeepSeek-V4, and patch the rest, before `DeepseekV4AttnBackend.__init__`."""
    refuse(unserved_v4(model_runner.model_config))
    install_v4()


PATCHES = (
    # The indexer's logits. SGLang asks these for DeepGEMM's functions, in every call.
    Patch(KERNELS, "resolve_fp8_mqa_logits_fn", lambda: deep_gemm.fp8_mqa_logits),
    Patch(KERNELS, "resolve_fp8_paged_mqa_logits_fn", lambda: deep_gemm.fp8_paged_mqa_logits),
    # DeepGEMM's schedule of a step, which xmla does not have, and the number of multiprocessors for its shape. SGLang
    # splits larger batches of decodes by it.
    Patch(KERNELS, "resolve_paged_mqa_logits_metadata_fn", lambda: deep_gemm.get_paged_mqa_logits_metadata),
    Patch(KERNELS, "resolve_num_sms", deep_gemm.get_num_sms),
    # CuTe DSL's logits would read that schedule.
    Patch(LOGITS, "DSAPagedMQALogitsBackend.resolve", indexer.resolve, HookType.BEFORE),
    # Top-k of the logits and what becomes of it: positions, slots of the pool, or rows of gathered entries.
    Patch(TOPK, "DSATopKBackend.topk_transform", indexer.topk_transform),
    # The plan of the top-k that is replaced: a kernel in every step, compiled by nvcc.
    Patch(BACKEND, "DeepseekSparseAttnBackend._build_topk_v2_plan", indexer.build_topk_v2_plan),
    # Attention by FlashMLA, which pads heads and runs on sm_90 and sm_100 alone.
    Patch(BACKEND, "DeepseekSparseAttnBackend._forward_flashmla_sparse", attention.forward_flashmla_sparse),
    Patch(BACKEND, "DeepseekSparseAttnBackend._forward_flashmla_kv", attention.forward_flashmla_kv),
    # FlashMLA's schedule of a step.
    Patch(BACKEND, "DeepseekSparseAttnBackend._compute_flashmla_metadata", attention.compute_flashmla_metadata),
    # The process ends: SGLang's own kernels would be called with what xmla's make.
    Patch(BACKEND, "DeepseekSparseAttnBackend.__init__", prepare, HookType.BEFORE),
    # Which of the user's backends are xmla's is known here, and SGLang's log is set up by then.
    Patch(BACKEND, "DeepseekSparseAttnBackend.__init__", attention.tell, HookType.AFTER),
    # Its pool is made by then. Else a kernel would be compiled while a graph is captured or a request waits.
    Patch(BACKEND, "DeepseekSparseAttnBackend.__init__", warmup.warm, HookType.AFTER),
    # SGLang counts the free memory before any step has run.
    Patch(POOLS, "KVCacheConfigurator._profile_available_bytes", scratch.beside_scratch, HookType.AROUND),
    # That the model is DeepSeek-V4 is known here. Its changes are to modules that no other model needs, some of which
    # other models' installations cannot import.
    Patch(BACKEND_V4, "DeepseekV4AttnBackend.__init__", prepare_v4, HookType.BEFORE),
    # As after V3.2's backend.
    Patch(BACKEND_V4, "DeepseekV4AttnBackend.__init__", warmup_v4.warm, HookType.AFTER),
)

V4_PATCHES = (
    # The indexer's logits over the pool. SGLang imports the function from DeepGEMM in every call.
    Patch("deep_gemm", "fp8_paged_mqa_logits", deep_gemm.fp8_paged_mqa_logits),
    # Its logits over keys that SGLang gathers, for which it asks DeepGEMM too.
    Patch(INDEXER_V4, "C4IndexerBackendMixin._nonpaged_mqa_logits", indexer_v4.nonpaged_mqa_logits),
    # The schedule of a step, which xmla does not have: DeepGEMM's, or SGLang's own, compiled by nvcc.
    Patch("deep_gemm", "get_paged_mqa_logits_metadata", deep_gemm.get_paged_mqa_logits_metadata),
    Patch(f"{KERNELS_V4}.attn", "get_paged_mqa_logits_metadata", indexer_v4.get_paged_mqa_logits_metadata),
    # Top-k of the logits and the slots of these, by one kernel, or another with SGLANG_OPT_USE_TOPK_V2=0.
    Patch(f"{KERNELS_V4}.topk", "topk_transform_paged_v2", indexer_v4.topk_transform_paged_v2),
    Patch(f"{KERNELS_V4}.topk", "topk_transform_paged", indexer_v4.topk_transform_paged),
    # The plan of the first: a kernel in every step, compiled by nvcc.
    Patch(f"{KERNELS_V4}.topk", "plan_topk_v2", indexer_v4.plan_topk_v2),
    # Attention by FlashMLA, in decodes and in prefills. Its schedule of a step is an empty object until its first call.
    Patch(FLASH_MLA, "flash_mla_with_kvcache", attention_v4.flash_mla_with_kvcache),
    Patch(FLASH_MLA, "flash_mla_sparse_fwd", attention_v4.flash_mla_sparse_fwd),
    # The heads to which SGLang pads a rank's for FlashMLA.
    Patch(MODEL_V4, "MqaAttentionBase._kernel_num_heads", attention_v4.kernel_num_heads),
)


def install(release: str) -> None:
    """Register every change with SGLang, which applies them when all plugins are loaded; none if one cannot be made.

    Raises:
        UnsupportedError: Something that is replaced is not there, or has other parameters.
    """
    register(PATCHES, release, OTHERWISE)


@cache
def install_v4() -> None:
    """Make the changes for DeepSeek-V4, once in a process.

    Raises:
        UnsupportedError: As above, or another plugin has changed something: SGLang hooks a function once, and passes
            over later hooks without a word. The model is being made: the process ends.
    """
    release = version("sglang")
    register(V4_PATCHES, release, f"without xmla in SGLANG_PLUGINS {OTHERWISE}")
    before = [current(patch) for patch in V4_PATCHES]
    HookRegistry.apply_hooks()
    kept = [patch.target for patch, f in zip(V4_PATCHES, before, strict=True) if current(patch) is f]
    if kept:
        raise UnsupportedError(
            f"xmla.sglang: SGLang {release} did not replace {', '.join(kept)}, which another plugin has changed; "
            "expected xmla alone in SGLANG_PLUGINS"
        )
    attention_v4.tell()


def current(patch: Patch) -> Callable[..., Any]:
    """The function that SGLang calls now."""
    function: Callable[..., Any] = attrgetter(patch.name)(importlib.import_module(patch.module))
    return function


def register(patches: Iterable[Patch], release: str, otherwise: str) -> None:
    for patch in patches:
        check(patch, release, otherwise)
    for patch in patches:
        HookRegistry.register(patch.target, patch.function, patch.hook)


def check(patch: Patch, release: str, otherwise: str = OTHERWISE) -> None:
    """Raise UnsupportedError unless the function is there, with the parameters of what is called in its place."""
    try:
        original = current(patch)
        actual, expected = (tuple(inspect.signature(f).parameters) for f in (original, patch.function))
    except Exception as error:  # a module of SGLang raises anything beside versions of packages that it does not know
        raise UnsupportedError(
            f"xmla.sglang: SGLang {release} has no {patch.target}, which xmla replaces "
            f"({type(error).__name__}: {error}); {otherwise}"
        ) from error
    expected = expected[1:] if patch.hook is HookType.AROUND else expected  # the function itself comes first
    if patch.hook is not HookType.AFTER and actual != expected:
        raise UnsupportedError(
            f"xmla.sglang: {patch.target} of SGLang {release} has the parameters ({', '.join(actual)}), "
            f"expected ({', '.join(expected)}); {otherwise}"
        )
