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
from xmla.sglang.refusals import refuse, unserved_v4

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
class Change:
    """One function of SGLang, and what is called in its place or, for another `hook`, before, after or around it."""

    module: str
    name: str
    function: Callable[..., Any]
    hook: HookType = HookType.REPLACE

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


def prepare_v4(
    self: Any, model_runner: Any, skip_prefill: bool = False, speculative_step_id: int = 0, topk: int = 0,
    speculative_num_steps: int = 0,
) -> None:  # fmt: skip
    """Before `DeepseekV4AttnBackend.__init__`."""
    refuse(unserved_v4(model_runner.model_config))
    install_v4()


CHANGES = (
    # The indexer's logits. SGLang asks these for DeepGEMM's functions, in every call.
    Change(KERNELS, "resolve_fp8_mqa_logits_fn", lambda: deep_gemm.fp8_mqa_logits),
    Change(KERNELS, "resolve_fp8_paged_mqa_logits_fn", lambda: deep_gemm.fp8_paged_mqa_logits),
    # DeepGEMM's schedule of a step, which xmla does not have, and the number of multiprocessors for its shape. SGLang
    # splits larger batches of decodes by it.
    Change(KERNELS, "resolve_paged_mqa_logits_metadata_fn", lambda: deep_gemm.get_paged_mqa_logits_metadata),
    Change(KERNELS, "resolve_num_sms", deep_gemm.get_num_sms),
    # CuTe DSL's logits would read that schedule.
    Change(LOGITS, "DSAPagedMQALogitsBackend.resolve", indexer.resolve, HookType.BEFORE),
    # Top-k of the logits and what becomes of it: positions, slots of the pool, or rows of gathered entries.
    Change(TOPK, "DSATopKBackend.topk_transform", indexer.topk_transform),
    # The plan of the top-k that is replaced: a kernel in every step, compiled by nvcc.
    Change(BACKEND, "DeepseekSparseAttnBackend._build_topk_v2_plan", indexer.build_topk_v2_plan),
    # Attention by FlashMLA, which pads heads and runs on sm_90 and sm_100 alone.
    Change(BACKEND, "DeepseekSparseAttnBackend._forward_flashmla_sparse", attention.forward_flashmla_sparse),
    Change(BACKEND, "DeepseekSparseAttnBackend._forward_flashmla_kv", attention.forward_flashmla_kv),
    # FlashMLA's schedule of a step.
    Change(BACKEND, "DeepseekSparseAttnBackend._compute_flashmla_metadata", attention.compute_flashmla_metadata),
    # Which of the user's backends are xmla's is known here, and SGLang's log is set up by then.
    Change(BACKEND, "DeepseekSparseAttnBackend.__init__", attention.tell, HookType.AFTER),
    # Its pool is made by then. Else a kernel would be compiled while a graph is captured or a request waits.
    Change(BACKEND, "DeepseekSparseAttnBackend.__init__", warmup.warm, HookType.AFTER),
    # SGLang counts the free memory before any step has run.
    Change(POOLS, "KVCacheConfigurator._profile_available_bytes", scratch.beside_scratch, HookType.AROUND),
    # That the model is DeepSeek-V4 is known here. Its changes are to modules that no other model needs, some of which
    # other models' installations cannot import.
    Change(BACKEND_V4, "DeepseekV4AttnBackend.__init__", prepare_v4, HookType.BEFORE),
    # As after V3.2's backend.
    Change(BACKEND_V4, "DeepseekV4AttnBackend.__init__", warmup_v4.warm, HookType.AFTER),
)

CHANGES_V4 = (
    # The indexer's logits over the pool. SGLang imports the function from DeepGEMM in every call.
    Change("deep_gemm", "fp8_paged_mqa_logits", deep_gemm.fp8_paged_mqa_logits),
    # Its logits over keys that SGLang gathers, for which it asks DeepGEMM too.
    Change(INDEXER_V4, "C4IndexerBackendMixin._nonpaged_mqa_logits", indexer_v4.nonpaged_mqa_logits),
    # The schedule of a step, which xmla does not have: DeepGEMM's, or SGLang's own, compiled by nvcc.
    Change("deep_gemm", "get_paged_mqa_logits_metadata", deep_gemm.get_paged_mqa_logits_metadata),
    Change(f"{KERNELS_V4}.attn", "get_paged_mqa_logits_metadata", indexer_v4.get_paged_mqa_logits_metadata),
    # Top-k of the logits and the slots of these, by one kernel, or another with SGLANG_OPT_USE_TOPK_V2=0.
    Change(f"{KERNELS_V4}.topk", "topk_transform_paged_v2", indexer_v4.topk_transform_paged_v2),
    Change(f"{KERNELS_V4}.topk", "topk_transform_paged", indexer_v4.topk_transform_paged),
    # The plan of the first: a kernel in every step, compiled by nvcc.
    Change(f"{KERNELS_V4}.topk", "plan_topk_v2", indexer_v4.plan_topk_v2),
    # Attention by FlashMLA, in decodes and in prefills. Its schedule of a step is an empty object until its first call.
    Change(FLASH_MLA, "flash_mla_with_kvcache", attention_v4.flash_mla_with_kvcache),
    Change(FLASH_MLA, "flash_mla_sparse_fwd", attention_v4.flash_mla_sparse_fwd),
    # The heads to which SGLang pads a rank's for FlashMLA.
    Change(MODEL_V4, "MqaAttentionBase._kernel_num_heads", attention_v4.kernel_num_heads),
)


def install(release: str) -> None:
    """Register every change with SGLang, which applies them when all plugins are loaded; none if one cannot be made.

    Raises:
        UnsupportedError: Something that is replaced is not there, or has other parameters.
    """
    register(CHANGES, release, OTHERWISE)


@cache
def install_v4() -> None:
    """Make those of DeepSeek-V4, once in a process.

    Raises:
        UnsupportedError: As above, or another plugin has changed something: SGLang hooks a function once, and passes
            over later hooks without a word. The model is being made: the process ends.
    """
    release = version("sglang")
    register(CHANGES_V4, release, f"without xmla in SGLANG_PLUGINS {OTHERWISE}")
    before = [current(change) for change in CHANGES_V4]
    HookRegistry.apply_hooks()
    kept = [change.target for change, f in zip(CHANGES_V4, before, strict=True) if current(change) is f]
    if kept:
        raise UnsupportedError(
            f"xmla.sglang: SGLang {release} did not replace {', '.join(kept)}, which another plugin has changed; "
            "expected xmla alone in SGLANG_PLUGINS"
        )
    attention_v4.tell()


def current(change: Change) -> Callable[..., Any]:
    """What SGLang calls now."""
    function: Callable[..., Any] = attrgetter(change.name)(importlib.import_module(change.module))
    return function


def register(changes: Iterable[Change], release: str, otherwise: str) -> None:
    for change in changes:
        check(change, release, otherwise)
    for change in changes:
        HookRegistry.register(change.target, change.function, change.hook)


def check(change: Change, release: str, otherwise: str = OTHERWISE) -> None:
    """Raise UnsupportedError unless the function is there, with the parameters of what is called in its place."""
    try:
        original = current(change)
        actual, expected = (tuple(inspect.signature(f).parameters) for f in (original, change.function))
    except Exception as error:  # a module of SGLang raises anything beside versions of packages that it does not know
        raise UnsupportedError(
            f"xmla.sglang: SGLang {release} has no {change.target}, which xmla replaces "
            f"({type(error).__name__}: {error}); {otherwise}"
        ) from error
    expected = expected[1:] if change.hook is HookType.AROUND else expected  # the function itself comes first
    if change.hook is not HookType.AFTER and actual != expected:
        raise UnsupportedError(
            f"xmla.sglang: {change.target} of SGLang {release} has the parameters ({', '.join(actual)}), "
            f"expected ({', '.join(expected)}); {otherwise}"
        )
