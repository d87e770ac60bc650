"""Every change that the plugin makes to SGLang, each with its reason."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from xmla.compat import deep_gemm
from xmla.core.errors import UnsupportedError
from xmla.sglang import attention, indexer, warmup

KERNELS = "sglang.srt.layers.attention.dsa.utils"
LOGITS = "sglang.srt.layers.attention.dsa.paged_mqa_logits_backend"
TOPK = "sglang.srt.layers.attention.dsa.dsa_topk_backend"
BACKEND = "sglang.srt.layers.attention.dsa_backend"
POOLS = "sglang.srt.mem_cache.kv_cache_configurator"


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


CHANGES = (
    # The indexer's logits. SGLang asks these for DeepGEMM's functions, in every call.
    Change(KERNELS, "resolve_fp8_mqa_logits_fn", lambda: deep_gemm.fp8_mqa_logits),
    Change(KERNELS, "resolve_fp8_paged_mqa_logits_fn", lambda: deep_gemm.fp8_paged_mqa_logits),
    # DeepGEMM's schedule of a step, which xmla does not have, and the number of multiprocessors for its shape. SGLang
    # splits larger batches of decodes by it.
    Change(KERNELS, "resolve_paged_mqa_logits_metadata_fn", lambda: deep_gemm.get_paged_mqa_logits_metadata),
    Change(KERNELS, "resolve_num_sms", deep_gemm.get_num_sms),
    # CuTe DSL's logits would read that schedule.
    Change(LOGITS, "DSAPagedMQALogitsBackend.resolve", indexer.refuse, HookType.BEFORE),
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
    Change(POOLS, "KVCacheConfigurator._profile_available_bytes", warmup.beside_scratch, HookType.AROUND),
)


def install(release: str) -> None:
    """Register every change with SGLang, which applies them when all plugins are loaded; none if one cannot be made.

    Raises:
        UnsupportedError: Something that is replaced is not there, or has other parameters.
    """
    for change in CHANGES:
        check(change, release)
    for change in CHANGES:
        HookRegistry.register(change.target, change.function, change.hook)


def check(change: Change, release: str) -> None:
    """Raise UnsupportedError unless the function is there, with the parameters of what is called in its place."""
    try:
        original = attrgetter(change.name)(importlib.import_module(change.module))
    except Exception as error:  # a module of SGLang raises anything beside versions of packages that it does not know
        raise UnsupportedError(
            f"xmla.sglang: SGLang {release} has no {change.target}, which xmla replaces "
            f"({type(error).__name__}: {error}); SGLang serves with its own kernels"
        ) from error
    actual, expected = (tuple(inspect.signature(f).parameters) for f in (original, change.function))
    expected = expected[1:] if change.hook is HookType.AROUND else expected  # the function itself comes first
    if change.hook is not HookType.AFTER and actual != expected:
        raise UnsupportedError(
            f"xmla.sglang: {change.target} of SGLang {release} has the parameters ({', '.join(actual)}), "
            f"expected ({', '.join(expected)}); SGLang serves with its own kernels"
        )
