"""`python choose.py`: install the plugin as on a GPU; where vLLM takes its attention, by compute capability.

vLLM's platform for CUDA is imported without its library, which needs a driver. Nothing of it runs.
"""

import ast
import importlib
import json
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args
from unittest.mock import MagicMock

import torch
from packaging.version import Version

sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")

from vllm import platforms  # noqa: E402
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.config.cache import CacheDType  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.platforms import cuda  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.transformers_utils.config import get_config, get_hf_text_config  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402

from xmla import UnsupportedError  # noqa: E402
from xmla.vllm import patches, refusals  # noqa: E402


class OwnWorker(Worker):
    """A worker of a user's, for `--worker-cls`, whose module is imported before vLLM loads plugins."""


CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
# Of models that 0.33 has and 0.26 has not, as their checkpoints say it, which nest the text model.
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm5_next": {"model_type": "glm5_next_text", "index_kpool": 4, "index_topk": 2048},
    "deepseek_v41": {"model_type": "deepseek_v41_text", "num_attention_heads": 64, "index_topk": 512,
                     "compress_ratios": [0, 1, 2], "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2]},
}  # fmt: skip


ARCHITECTURES = {
    "deepseek_v32": "DeepseekV32ForCausalLM", "glm5_next": "Glm5NextForConditionalGeneration",
    "deepseek_v41": "DeepseekV41ForCausalLM",
}  # fmt: skip


def selector(cache: str, dims: int = 576, **wanted: bool) -> AttentionSelectorConfig:
    """What vLLM asks a backend for: sparse attention, and of `wanted` what this release knows."""
    known = {name: value for name, value in wanted.items() if name in AttentionSelectorConfig._fields}
    return AttentionSelectorConfig(dims, torch.bfloat16, cache, None, **{"use_mla": True, "use_sparse": True} | known)


def refused(capability: tuple[int, int], asked: AttentionSelectorConfig) -> list[str]:
    """Why vLLM goes on from the first backend of its list; nothing, if it takes it."""
    first, *_ = cuda._get_backend_priorities(True, DeviceCapability(*capability), 16, asked.kv_cache_dtype)
    backend = first.get_class()
    assert backend.__name__ == "XmlaSparseBackend"
    return backend.validate_configuration(device_capability=DeviceCapability(*capability), **asked._asdict())


def without_another() -> str:
    """What vLLM says on sm_90 of a model that xmla refuses, and that other sparse kernels may serve."""
    cuda.CudaPlatform.get_device_capability = staticmethod(lambda *_: DeviceCapability(9, 0))
    try:
        return cuda.CudaPlatform.get_attn_backend_cls(None, selector("fp8", use_pcp=True), 16)
    except ValueError as error:
        return str(error)


def with_dims(latent: int, roped: int) -> SimpleNamespace:
    """vLLM's configuration of a model whose entries have so many dims."""
    return SimpleNamespace(hf_text_config=SimpleNamespace(kv_lora_rank=latent, qk_rope_head_dim=roped))


def with_sinks(capability: tuple[int, int]) -> str:
    """The backend that Hy4's layers take for a cache in fp8, each head of which has a sink."""
    from vllm.models.hy_v4.nvidia import attention

    def choose(**asked: Any) -> type:
        wanted = {name: asked[name] for name in ("use_mla", "use_sparse")}
        reasons = refused(capability, selector(asked["kv_cache_dtype"], asked["head_size"], **wanted))
        assert not reasons, reasons
        return AttentionBackendEnum.CUSTOM.get_class()

    cuda.CudaPlatform.get_device_capability = staticmethod(lambda *_: DeviceCapability(*capability))
    attention.get_attn_backend, attention.current_platform = choose, cuda.CudaPlatform
    layer = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, is_sparse=True, num_local_heads=64)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    backend = attention.HYV4MLAAttention._resolve_sink_backend(layer, "fp8")
    torch.set_default_dtype(default)
    return "none" if backend is None else backend.__name__


def v4_layers(version: str, backend: str) -> str:
    """The class of attention of a DeepSeek-V4 for a backend that the user names."""
    named = AttentionBackendEnum[backend] if backend != "None" else None
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=named),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
    )
    return v4_model(version)._select_dsv4_attn_cls(config).__name__


def v4_model(version: str) -> Any:
    return importlib.import_module(f"vllm.models.deepseek_{version}.nvidia.model")


def v4_unserved(version: str) -> str:
    """What a layer says of a model with images that DSpark drafts for, on ranks that share keys."""
    drafts, images = SimpleNamespace(use_dspark=lambda: True), SimpleNamespace(vision_n_layers=1)
    config = SimpleNamespace(speculative_config=drafts, model_config=SimpleNamespace(hf_config=images))
    config.attention_config = SimpleNamespace(backend=None)
    config.parallel_config = SimpleNamespace(decode_context_parallel_size=2, use_ubatching=True)
    try:
        v4_model(version)._select_dsv4_attn_cls(config)(config)
    except UnsupportedError as error:
        return str(error)
    return ""


def v4_graphs(version: str, config: VllmConfig) -> str:
    """Which steps' attention of a DeepSeek-V4 may be in a graph."""
    select = v4_model(version)._select_dsv4_attn_cls
    layer = select(SimpleNamespace(attention_config=SimpleNamespace(backend=None)))
    return layer.window_backend.get_builder_cls().get_cudagraph_support(config, None).name


def with_an_indexer() -> list[str]:
    """Architectures of vLLM's registry, but for drafts, whose sources on Nvidia's GPUs read `index_topk`.

    So do those of the class that theirs is derived from.
    """
    models, drafts = registry._VLLM_MODELS, registry._SPECULATIVE_DECODING_MODELS
    reads = {module: any(READS.search(file.read_text()) for file in sources(module)) for module, _ in models.values()}
    return [
        name
        for name, (module, each) in models.items()
        if name not in drafts and (reads[module] or any(reads.get(base, False) for base in bases(module, each)))
    ]


READS = re.compile(r"config\.index_topk\b|[\"']index_topk[\"']")


def sources(module: str) -> list[Path]:
    """The files of a module of the registry, without those for other devices."""
    models = Path(registry.__file__).parent
    place = models.parents[2] / module.replace(".", "/") if module.startswith("vllm.") else models / module
    others = {"amd", "xpu", "cpu"}
    return [f for f in place.rglob("*.py") if not others & {*f.parts}] if place.is_dir() else [place.with_suffix(".py")]


def bases(module: str, name: str) -> list[str]:
    """The modules, beside this one, from which it imports what this class is derived from."""
    for tree in (ast.parse(file.read_text()) for file in sources(module)):
        nodes = [*ast.walk(tree)]
        imported = {
            alias.name: node.module
            for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None
            for alias in node.names
        }  # fmt: skip
        for node in nodes:
            if isinstance(node, ast.ClassDef) and node.name == name:
                found = [imported.get(base.id) for base in node.bases if isinstance(base, ast.Name)]
                return [base.removeprefix("vllm.model_executor.models.") for base in found if base is not None]
    return []


def pretended(capability: tuple[int, int]) -> SimpleNamespace:
    """What is asked of vLLM's platform, on this GPU."""
    found = DeviceCapability(*capability)
    return SimpleNamespace(
        is_cuda=lambda: True, get_device_capability=lambda: found,
        is_device_capability_family=lambda family: found.major == family // 10,
    )  # fmt: skip


def attention_of(architecture: str, capability: tuple[int, int], config: VllmConfig) -> str:
    """The class of a model's sparse attention on this GPU, or why it is not served."""
    kept = platforms.current_platform
    kind, dims = KINDS.get(architecture, ("deepseek_v32", 576))
    text = SimpleNamespace(
        model_type=kind, index_topk=2048, kv_lora_rank=512, qk_rope_head_dim=64 if dims == 576 else 0
    )  # fmt: skip
    if kind == "glm5_next_text":
        text.index_kpool = 4
    config.model_config = SimpleNamespace(
        hf_text_config=text, hf_config=SimpleNamespace(vision_n_layers=0), architecture=architecture
    )
    platforms._current_platform = pretended(capability)
    try:
        refusals.refuse(refusals.unserved(config))
        if kind.startswith("deepseek_v4"):
            from xmla.vllm import attention_v4_base

            attention_v4_base.current_platform = pretended(capability)
            layer = v4_model(kind.removeprefix("deepseek_"))._select_dsv4_attn_cls(config)
            refusals.refuse(layer.unserved(config))
            return layer.__name__
    except UnsupportedError as error:
        return str(error)
    finally:
        platforms._current_platform = kept
    return ", ".join(refused(capability, selector("fp8", dims))) or "XmlaSparseBackend"


# What is not V3.2's: the kind of layers, and the dims of an entry.
KINDS = {
    "DeepseekV4ForCausalLM": ("deepseek_v4", 512), "DeepseekV4ForConditionalGeneration": ("deepseek_v4", 512),
    "DeepseekV41ForCausalLM": ("deepseek_v41", 512), "Glm5NextForCausalLM": ("glm5_next_text", 512),
    "Glm5NextForConditionalGeneration": ("glm5_next_text", 512), "HYV4ForCausalLM": ("hy_v4", 576),
}  # fmt: skip


def transfers(capability: tuple[int, int], config: VllmConfig) -> list[str]:
    """The models whose caches are not moved between nodes: of V3.2, and of V4.1 if the release has it."""
    from vllm.utils import deep_gemm

    deep_gemm.current_platform = pretended(capability)
    if hasattr(deep_gemm, "mqa_logits_use_mx_scales"):
        deep_gemm.mqa_logits_use_mx_scales.cache_clear()
    config.kv_transfer_config = object()
    names = [name for name in ("DeepseekV32ForCausalLM", "DeepseekV41ForCausalLM") if name in with_an_indexer()]
    found = [name for name in names if "kv_transfer_config" in attention_of(name, capability, config)]
    config.kv_transfer_config = None
    return found


def text_config(kind: str) -> Any:
    """The configuration that vLLM reads of a checkpoint of this model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": kind, "text_config": PUBLISHED[kind]}))
        return get_hf_text_config(get_config(folder, trust_remote_code=False))


def refused_at_start(config: VllmConfig, worker: type) -> list[str]:
    """What the worker says of engines that are not served, before it loads weights: two micro-batches are set already.

    Of one whose keys are MXFP4, as none are before 0.33, and, if the release has them, of a model with such pooled keys
    that ranks share and of V4.1 with an option of vLLM's own kernels.
    """
    models = {"deepseek_v32": SimpleNamespace(model_type="deepseek_v32", index_topk=2048)}
    if Version(version("vllm")) >= Version("0.33"):
        models |= {kind: text_config(kind) for kind in PUBLISHED}
    said = []
    for kind, model in models.items():
        architecture = ARCHITECTURES[kind]
        config.model_config = SimpleNamespace(hf_text_config=model, hf_config=None, architecture=architecture)
        config.attention_config.indexer_kv_dtype = "mxfp4"
        if kind == "deepseek_v41":
            config.attention_config.indexer_sparse_logits = True
        config.parallel_config.decode_context_parallel_size = 2 if kind == "glm5_next" else 1
        try:
            worker.load_model(SimpleNamespace(vllm_config=config))
        except UnsupportedError as error:
            said.append(str(error))
    return said


def kernels_by_tokens() -> list[Any]:
    """Whether, with the same bits in any batch, vLLM's layers still take kernels that are for few tokens."""
    from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear
    from vllm.models.common.ops import fused_allreduce_rms_norm

    patches.apply_all(patches.INVARIANCE_PATCHES, version("vllm"))
    layer = DeepSeekV2FusedQkvAProjLinear.__new__(DeepSeekV2FusedQkvAProjLinear)
    torch.nn.Module.__init__(layer)
    layer._use_min_latency_gemm = True  # as for weights of V3.2 in bfloat16
    chosen = [layer._use_min_latency_gemm, fused_allreduce_rms_norm._can_use_flashinfer(torch.empty(1, 8), 8)]
    sys.modules["vllm.tilelang_utils"] = MagicMock()  # of a package that this environment does without
    patches.apply_all(patches.V4_INVARIANCE_PATCHES, version("vllm"))
    from vllm.model_executor.kernels.mhc import tilelang_kernels as mhc
    from vllm.models.deepseek_v4 import compressor, sparse_mla

    few = [mhc.compute_num_split(64, 28672, 1), mhc.mhc_fused_post_pre_split_config(1, 7168, 4)]
    memory = [torch.empty(8, 256, dtype=torch.int32), torch.empty(8, dtype=torch.int32)]
    positions = torch.arange(0)  # no token: what is built has its width alone
    slots, _, local = sparse_mla.build_c128a_topk_metadata(
        positions, 128, 0, positions, memory[0], 2, positions, *memory, memory[0], max_compressed_tokens=128
    )
    return [*chosen, *few, slots.shape[1], local.shape[1], compressor.CompressorBackend.supports_batch_invariance()]


def choose() -> None:
    patches.current_platform = SimpleNamespace(is_cuda=lambda: True, dispatch_key="CUDA")
    for _ in range(2):  # vLLM may load a plugin several times
        patches.install(version("vllm"))
    cases = {
        "fp8": selector("fp8"), "bf16": selector("auto"), "dense": selector("auto", use_sparse=False),
        "ranks that share keys": selector("fp8", use_dcp=True), "fp4": selector("nvfp4_ds_mla"),
    }  # fmt: skip
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        config.model_config = with_dims(512, 64)
        found = {
            name: {f"sm_{major}{minor}": refused((major, minor), asked) for major, minor in CAPABILITIES}
            for name, asked in cases.items()
        }
        found["architectures"] = {
            name: {f"sm_{major}{minor}": attention_of(name, (major, minor), config) for major, minor in CAPABILITIES}
            for name in with_an_indexer()
        }
        found["transfers"] = {f"sm_{major}{minor}": transfers((major, minor), config) for major, minor in CAPABILITIES}
        config.cache_config.cache_dtype = "nvfp4_ds_mla"
        for name in ("V4", "V41"):
            found[f"fp4 of {name}"] = attention_of(f"Deepseek{name}ForCausalLM", (9, 0), config)
        config.cache_config.cache_dtype = "auto"
        versions = ("v4", "v41") if Version(version("vllm")) >= Version("0.33") else ("v4",)
        for each in versions:
            backends = "None", "CUSTOM", f"FLASHMLA_SPARSE_DS{each.upper()}"
            found[each] = {name: v4_layers(each, name) for name in backends}
        found["unserved"], found["another"] = {each: v4_unserved(each) for each in versions}, without_another()
        found["caches"] = {name: refused((9, 0), selector(name)) for name in get_args(CacheDType)}
        found["dims"] = {}
        for latent, roped in ((512, 64), (512, 0), (448, 64), (448, 128), (544, 32), (576, 0), (256, 64)):
            config.model_config = with_dims(latent, roped)
            found["dims"][f"{latent} {roped}"] = refused((9, 0), selector("fp8", latent + roped))
        if "v41" in versions:
            config.model_config = with_dims(512, 64)
            found["sinks"] = {f"sm_{major}{minor}": with_sinks((major, minor)) for major, minor in CAPABILITIES}
        config.parallel_config.enable_dbo = True
        found["micro-batches"] = refused((9, 0), cases["fp8"])
        found["graphs"] = [v4_graphs(each, config) for each in versions]
    found["start"] = refused_at_start(config, OwnWorker)
    names = "load_model", "determine_available_memory", "compile_or_warm_up_model", "execute_model", "save_selections"
    found["worker"] = {name: getattr(OwnWorker, name).__module__ for name in names}
    if Version(version("vllm")) >= Version("0.33"):
        found["invariant"] = kernels_by_tokens()
    print(json.dumps(found))


if __name__ == "__main__":
    choose()
