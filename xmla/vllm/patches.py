"""Every change that the plugin makes to vLLM, each with its reason."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.platforms import current_platform
from vllm.utils.torch_utils import vllm_lib
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from xmla.core.errors import UnsupportedError
from xmla.vllm import adapters, contract, fp4, indexer, pools, recording, warmup, without_e4m3
from xmla.vllm.contract import EVERY, OTHERWISE, SINCE_033
from xmla.vllm.refusals import (
    has_e4m3,
    has_fp4_entries,
    has_fp4_keys,
    has_indexer,
    is_batch_invariant,
    pool_size,
    refuse,
)

BACKEND = "xmla.vllm.backend.XmlaSparseBackend"
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
METADATA = "vllm.v1.attention.backends.mla.indexer"
V32 = "vllm.models.deepseek_v32.attention"
V4 = "vllm.models.deepseek_v4"
V4_MODEL = f"{V4}.nvidia.model"
QUERIES = f"{V4}.common.ops.fused_indexer_q"
CUTEDSL_QUERIES = f"{V4}.nvidia.ops.fused_indexer_q_cutedsl"
MHC = "vllm.model_executor.kernels.mhc.tilelang_kernels"
V41 = "vllm.models.deepseek_v41"
GLM = "vllm.models.glm5next.nvidia"
V3_LAYERS = "vllm.model_executor.models.deepseek_v2"


@dataclass(frozen=True, slots=True)
class Patch:
    """One function of vLLM, and what `replace` makes of it.

    Attributes:
        on_gpu: Whether the module needs CUDA.
        takes: The first parameters that the function has to have, as its replacement reads them.
    """

    module: str
    name: str
    replace: Callable[[Any], Any]
    releases: SpecifierSet = EVERY
    on_gpu: bool = False
    takes: tuple[str, ...] = ()


def prefer_xmla_for_mla(priorities: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The backends that vLLM tries: xmla's, which refuses dense MLA, and then those of dense MLA.

    None of sparse MLA comes behind: of a model or an option that xmla does not serve vLLM then tells xmla's reason.
    """

    def prefer_xmla(use_mla: bool, *args: Any, **kwargs: Any) -> list[Any]:
        others = priorities(use_mla, *args, **kwargs)
        if not use_mla:
            return others
        return [AttentionBackendEnum.CUSTOM, *(backend for backend in others if "SPARSE" not in backend.name)]

    return prefer_xmla


def prefer_xmla_for_layers(module: str, name: str) -> Callable[[Any], Any]:
    """The class of a DeepSeek-V4's attention: xmla's, unless the user names another backend."""

    def patched(select: Callable[[Any], type]) -> Callable[[Any], type]:
        def prefer_xmla(vllm_config: Any) -> type:
            if vllm_config.attention_config.backend not in (None, AttentionBackendEnum.CUSTOM):
                return select(vllm_config)
            return getattr(importlib.import_module(module), name)  # it imports the module that is changed here

        return prefer_xmla

    return patched


def op_by_keywords(module: Any) -> Callable[[Any], Any]:
    """An op of the indexer, by a module's `run`. Its arguments are taken by name: releases insert new ones between."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(original).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        unknown = module.ARGUMENTS.unknown(original)

        @eager_break_during_capture  # as the original: piecewise graphs break here, since a step's metadata changes
        def op(*args: Any, **kwargs: Any) -> Any:
            call = defaults | dict(zip(parameters, args, strict=False)) | kwargs
            if unknown:
                refuse(contract.unserved(original.__name__, call, unknown))
            return module.run(call)

        return op

    return replace


def mark_invariant(backend: Any) -> Any:
    """A backend that is served with VLLM_BATCH_INVARIANT=1, with those that derive from it."""
    backend.supports_batch_invariance = classmethod(lambda _: True)
    return backend


def always(answer: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *_: answer


def other(module: str, name: str) -> Callable[[Any], Any]:
    """What the module has by another name."""
    return lambda _: getattr(importlib.import_module(module), name)


def by_ops(module: str, function: Callable[..., Any]) -> Patch:
    """A function in the place of vLLM's of the same name, whose first parameters are its own, but for keywords."""
    parameters = inspect.signature(function).parameters.items()
    takes = tuple(name for name, parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY)
    return Patch(module, function.__name__, lambda _: function, SINCE_033, takes=takes)


def force_one_gemm(layer: type) -> type:
    """A layer's product by the same kernel for any number of tokens; the layer sets what is read-only here."""
    layer._use_min_latency_gemm = property(lambda _: False, lambda *_: None)
    return layer


def take_widest(build: Callable[..., Any]) -> Callable[..., Any]:
    """Slots of V4's entries of 128 tokens as wide as their memory, not as the longest request of a step."""

    def build_c128a_topk_metadata(*args: Any, max_compressed_tokens: int, **kwargs: Any) -> Any:
        memory = inspect.signature(build).bind(*args, **kwargs).arguments["prefill_buffer"]
        return build(*args, **kwargs, max_compressed_tokens=memory.shape[1])

    return build_c128a_topk_metadata


def without_deep_gemm(outputs: Callable[..., Any]) -> Callable[..., Any]:
    """The product before mHC of a model's first layer, in torch where vLLM would leave it to DeepGEMM alone."""
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    def hc_prenorm_gemm_outputs(x: Any, fn: Any, *, use_tilelang_fallback: bool = True, **sizes: Any) -> Any:
        if use_tilelang_fallback or is_deep_gemm_supported():
            return outputs(x, fn, use_tilelang_fallback=use_tilelang_fallback, **sizes)
        rows = x.float()
        return (rows @ fn.T)[None], rows.square().sum(-1)[None]  # of one split

    return hc_prenorm_gemm_outputs


def change_worker(worker: type) -> type:
    """vLLM's worker, which changes what is for one model or one mode alone before it loads a model."""

    def prepare(config: Any) -> None:
        if pool_size(config) > 1:
            apply_all(POOL_PATCHES, version("vllm"))
        if has_indexer(config) and not has_e4m3():  # before those of fp4, which may wrap them
            apply_all(E4M3_PATCHES, version("vllm"))
        if has_indexer(config) and has_fp4_keys(config):  # before those of entries, likewise
            from vllm.utils.import_utils import has_cutedsl

            apply_all(FP4_KEY_PATCHES, version("vllm"))
            if has_cutedsl():
                apply_all(CUTEDSL_FP4_KEY_PATCHES, version("vllm"))
        if has_indexer(config) and has_fp4_entries(config):
            apply_all(FP4_PATCHES, version("vllm"))
        if has_indexer(config) and config.lora_config is not None:
            apply_all(LORA_PATCHES, version("vllm"))
        if has_indexer(config) and is_batch_invariant():
            apply_all(INVARIANCE_PATCHES, version("vllm"))
            if config.model_config.hf_text_config.model_type == "deepseek_v4":
                apply_all(V4_INVARIANCE_PATCHES, version("vllm"))

    warmup.warm_up_in(worker, prepare)
    recording.record_in(worker)
    return worker


PATCHES = (
    # Without --attention-backend vLLM takes the first of this list that serves the model. A backend that the user
    # names stays what it is; `--attention-backend CUSTOM` names xmla's.
    Patch("vllm.platforms.cuda", "_get_backend_priorities", prefer_xmla_for_mla, on_gpu=True, takes=("use_mla",)),
    # DeepSeek-V4's layers ask for no backend, but for a class by the backend that the user names. So do V4.1's.
    Patch(
        V4_MODEL,
        "_select_dsv4_attn_cls",
        prefer_xmla_for_layers("xmla.vllm.attention_v4", "XmlaV4Attention"),
        takes=("vllm_config",),
    ),
    Patch(
        f"{V41}.nvidia.model",
        "_select_dsv4_attn_cls",
        prefer_xmla_for_layers("xmla.vllm.attention_v41", "XmlaV41Attention"),
        SINCE_033,
        takes=("vllm_config",),
    ),
    # On sm_100 vLLM's caches of V4.1 have entries of 528 bytes; with xmla they have V4's everywhere, as on Hopper,
    # unless the user asks for others (`FP4_PATCHES`).
    Patch(f"{V41}.attention", "_use_v41_mxfp8_kv_record", always(False), SINCE_033),
    # The model's layer calls the function as an op (`install` replaces its kernel), fused models by its name.
    Patch(INDEXER, "sparse_attn_indexer", op_by_keywords(indexer)),
    # The layer refuses to be made without DeepGEMM, which xmla does not need and which sm_89 does not have.
    Patch(INDEXER, "has_deep_gemm", always(True)),
    # The metadata has a schedule of DeepGEMM's kernels in every step, if they are there.
    Patch(METADATA, "has_deep_gemm", always(False)),
    # Without DeepGEMM vLLM makes a request of each token where a request has more than two, and each reads all keys.
    # xmla's logits take any number of tokens together.
    Patch(METADATA, "_supports_native_decode", always(True), SINCE_033),
    # Adaptive verification trims drafts on the device. Metadata then has a row of each token, whose length that says.
    Patch(METADATA, "_supports_flattened_device_query_lens", always(True), SINCE_033),
    # The runner asks the indexer's backend too, and vLLM's says no.
    Patch(METADATA, "DeepseekV32IndexerBackend", mark_invariant, SINCE_033),
    # The first layer of V4 asks for DeepGEMM, which sm_89 does not have, and the others do not.
    Patch(
        "vllm.model_executor.kernels.mhc.tilelang",
        "_hc_prenorm_gemm_outputs",
        without_deep_gemm,
        SINCE_033,
        takes=("x", "fn"),
    ),
    # It has the configuration before weights are loaded, for refusals, and its own warm-up knows nothing of xmla's
    # kernels, which a first step would wait for. The last: it imports models.
    Patch("vllm.v1.worker.gpu_worker", "Worker", change_worker, on_gpu=True),
)
# For GLM-5.3-Flash, made before such a model is: the package imports all that its images need.
POOL_PATCHES = (
    Patch(f"{GLM}.sparse_indexer", "sparse_attn_indexer_kpool", op_by_keywords(pools), SINCE_033),
    # As of `INDEXER`.
    Patch(f"{GLM}.sparse_indexer", "has_deep_gemm", always(True), SINCE_033),
)
# For caches of nvfp4_ds_mla, which vLLM's own kernels write and read on sm_100 alone.
FP4_PATCHES = (
    Patch(V32, "fused_norm_rope", fp4.write_behind, SINCE_033),
    # A window of 528 bytes beside compressed entries of 288, on any GPU.
    Patch(f"{V41}.attention", "_use_v41_mxfp8_kv_record", always(True), SINCE_033),
    Patch(f"{V41}.common.ops.fused_compress_quant_cache", "_fp32x2_to_fp4x2", lambda _: fp4.pack_pair, SINCE_033),
)
# For keys of the indexer in MXFP4, which vLLM has for V4 and V4.1 alone, and on sm_100.
FP4_KEY_PATCHES = (
    # It raises on other GPUs. Each module has the function by its name.
    *(
        Patch(module, "dsa_indexer_uses_fp4", fp4.as_asked, SINCE_033, takes=("vllm_config",))
        for module in (METADATA, f"{V4}.attention", f"{V41}.attention")
    ),
    # V3.2's layers, those of models that vLLM builds of V3's, and Hy4's ask for rows of 132 bytes.
    Patch(V3_LAYERS, "DeepseekV32IndexerCache", fp4.store_packed, SINCE_033),
    Patch(V32, "fused_norm_rope", fp4.write_keys_behind, SINCE_033),
    # Queries are MXFP4 where keys are, by an instruction of sm_100.
    *(Patch(f"{model}.attention", "fused_indexer_q_rope_quant", fp4.in_e4m3, SINCE_033) for model in (V4, V41)),
    Patch(f"{V4}.common.ops.fused_compress_quant_cache", "_fp32x2_to_fp4x2", lambda _: fp4.pack_pair, SINCE_033),
    Patch(f"{V41}.common.ops.indexer_k_store", "_fp32x2_to_fp4x2", lambda _: fp4.pack_pair, SINCE_033),
    # V4's layers have the kernel of such queries compiled at start.
    Patch(
        QUERIES,
        "_FUSED_INDEXER_Q_ROPE_MXFP4_TRITON_KERNEL",
        other(QUERIES, "_FUSED_INDEXER_Q_ROPE_QUANT_TRITON_KERNEL"),
        SINCE_033,
    ),
)
# The same kernel where vLLM has it in CuTe DSL.
CUTEDSL_FP4_KEY_PATCHES = (
    Patch(CUTEDSL_QUERIES, "_INDEXER_Q_MXFP4_KERNEL", other(CUTEDSL_QUERIES, "_INDEXER_Q_FP8_KERNEL"), SINCE_033),
)
# For engines that take adapters.
LORA_PATCHES = (
    # It leaves out what adapters add to weights whose modules a layer does not call.
    Patch("vllm.lora.worker_manager", "WorkerLoRAManager", adapters.refuse_unread),
)
# With VLLM_BATCH_INVARIANT=1, where vLLM leaves a kernel to the number of tokens of a step.
INVARIANCE_PATCHES = (
    # Weights of V3.2 in bfloat16 have one for up to 16 tokens.
    Patch(V3_LAYERS, "DeepSeekV2FusedQkvAProjLinear", force_one_gemm, SINCE_033),
    # FlashInfer adds ranks' parts and computes the norm in one, of as many tokens as its buffer holds.
    Patch("vllm.models.common.ops.fused_allreduce_rms_norm", "_can_use_flashinfer", always((False, 0)), SINCE_033),
)
# The same of DeepSeek-V4, whose modules import packages that other models do without.
V4_INVARIANCE_PATCHES = (
    Patch(f"{V4}.compressor", "CompressorBackend", mark_invariant, SINCE_033),
    Patch(f"{V4}.sparse_mla", "build_c128a_topk_metadata", take_widest, SINCE_033),
    # The product before mHC is divided into sums by the number of tokens, and for few of them made with what is before.
    Patch(MHC, "compute_num_split", always(1), SINCE_033),
    Patch(MHC, "_FUSED_POST_PRE_MAX_TOKENS", lambda _: 0, SINCE_033),
)
# Where the GPU has no e4m3, vLLM's functions that quantise to it: Triton refuses their kernels there.
E4M3_PATCHES = (
    # V3.2's and GLM-5's layers: norms, rotations and writes of both caches; rotation and quantisation of queries.
    by_ops(V32, without_e4m3.fused_norm_rope),
    by_ops(V32, without_e4m3.fused_q),
    # Those of models that vLLM builds of V3's layers, and Hy4's.
    by_ops(V3_LAYERS, without_e4m3.fused_indexer_q_rope_quant),
    by_ops(V3_LAYERS, without_e4m3.per_token_group_quant_fp8),
    by_ops("vllm.models.hy_v4.nvidia.attention", without_e4m3.per_token_group_quant_fp8),
)


def install(release: str) -> None:
    """Make every change that is for this release, once in a process.

    Raises:
        UnsupportedError: Something that is replaced or read is not there or is another, or a model that calls it was
            imported before.
    """
    if AttentionBackendEnum.CUSTOM.is_overridden() and AttentionBackendEnum.CUSTOM.get_path() == BACKEND:
        return
    original = getattr(importlib.import_module(INDEXER), "sparse_attn_indexer", None)
    for patch in PATCHES:
        if patch.releases.contains(release) and (current_platform.is_cuda() or not patch.on_gpu):
            apply(patch, release)
    contract.check(release)
    loaded = {name: getattr(module, "__dict__", {}) for name, module in sys.modules.items()}
    early = [name for name, names in loaded.items() if names.get("sparse_attn_indexer") is original]
    if early:
        raise UnsupportedError(f"xmla.vllm: {', '.join(early)} imported vLLM's sparse_attn_indexer before the plugin")
    kernel = importlib.import_module(INDEXER).sparse_attn_indexer
    vllm_lib.impl("sparse_attn_indexer", kernel, dispatch_key=current_platform.dispatch_key, allow_override=True)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


@cache
def apply_all(patches: tuple[Patch, ...], release: str) -> None:
    """Make those of some changes that are for this release, once in a process: others than `install` makes."""
    for patch in patches:
        if patch.releases.contains(release):
            apply(patch, release)


def apply(patch: Patch, release: str) -> None:
    """Make a change.

    Raises:
        UnsupportedError: The function that is replaced is not there, or takes other things, or a class lacks a method.
    """
    try:
        module = importlib.import_module(patch.module)
        original = getattr(module, patch.name)
        replaced = patch.replace(original)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"xmla.vllm: vLLM {release} has no {patch.module}.{patch.name}, which xmla replaces ({error}); {OTHERWISE}"
        ) from error
    if patch.takes and (actual := tuple(inspect.signature(original).parameters))[: len(patch.takes)] != patch.takes:
        difference = contract.differing(f"{patch.module}.{patch.name}", release, actual, patch.takes)
        raise UnsupportedError(f"xmla.vllm: {difference}; {OTHERWISE}")
    setattr(module, patch.name, replaced)
