"""Which functions the plugin replaces in each release of vLLM, above stand-ins of vLLM's modules.

tests/vllm_engine runs the engines themselves, of two releases, and not where CI does.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import make_dataclass
from logging import getLogger
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from xmla import UnsupportedError
from xmla.vllm import TESTED, contract, indexer, pools, without_e4m3

INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
BACKEND = "vllm.v1.attention.backends.mla.indexer"
QUANTIZE = "fused_indexer_q_rope_quant"
V4, V41, GLM = "vllm.models.deepseek_v4", "vllm.models.deepseek_v41", "vllm.models.glm5next.nvidia"

# What is replaced on a GPU: in every release, and since 0.33; `*` is replaced on CUDA alone.
EVERY = {
    "*vllm.platforms.cuda._get_backend_priorities",
    f"{V4}.nvidia.model._select_dsv4_attn_cls",
    f"{INDEXER}.sparse_attn_indexer",
    f"{INDEXER}.has_deep_gemm",
    f"{BACKEND}.has_deep_gemm",
    "*vllm.v1.worker.gpu_worker.Worker",
}
SINCE_033 = {
    f"{V41}.nvidia.model._select_dsv4_attn_cls",
    f"{V41}.attention._use_v41_mxfp8_kv_record",
    f"{BACKEND}._supports_native_decode",
    f"{BACKEND}._supports_flattened_device_query_lens",
    f"{BACKEND}.DeepseekV32IndexerBackend",
    "vllm.model_executor.kernels.mhc.tilelang._hc_prenorm_gemm_outputs",
}
OF_POOLS = {
    f"{GLM}.sparse_indexer.sparse_attn_indexer_kpool",
    f"{GLM}.sparse_indexer.has_deep_gemm",
}
OF_INVARIANCE = {
    "vllm.model_executor.models.deepseek_v2.DeepSeekV2FusedQkvAProjLinear",
    "vllm.models.common.ops.fused_allreduce_rms_norm._can_use_flashinfer",
}
OF_FP4 = {
    "vllm.models.deepseek_v32.attention.fused_norm_rope",
    f"{V41}.attention._use_v41_mxfp8_kv_record",
    f"{V41}.common.ops.fused_compress_quant_cache._fp32x2_to_fp4x2",
}
OF_FP4_KEYS = {
    f"{BACKEND}.dsa_indexer_uses_fp4",
    *(f"{model}.attention.{name}" for model in (V4, V41) for name in ("dsa_indexer_uses_fp4", QUANTIZE)),
    "vllm.model_executor.models.deepseek_v2.DeepseekV32IndexerCache",
    "vllm.models.deepseek_v32.attention.fused_norm_rope",
    f"{V4}.common.ops.fused_compress_quant_cache._fp32x2_to_fp4x2",
    f"{V41}.common.ops.indexer_k_store._fp32x2_to_fp4x2",
    f"{V4}.common.ops.fused_indexer_q._FUSED_INDEXER_Q_ROPE_MXFP4_TRITON_KERNEL",
}
OF_CUTEDSL_KEYS = {f"{V4}.nvidia.ops.fused_indexer_q_cutedsl._INDEXER_Q_MXFP4_KERNEL"}
# What takes the place of the last two.
OTHERS = {
    f"{V4}.common.ops.fused_indexer_q._FUSED_INDEXER_Q_ROPE_QUANT_TRITON_KERNEL",
    f"{V4}.nvidia.ops.fused_indexer_q_cutedsl._INDEXER_Q_FP8_KERNEL",
}
OF_E4M3 = {
    "vllm.models.deepseek_v32.attention.fused_norm_rope",
    "vllm.models.deepseek_v32.attention.fused_q",
    "vllm.model_executor.models.deepseek_v2.fused_indexer_q_rope_quant",
    "vllm.model_executor.models.deepseek_v2.per_token_group_quant_fp8",
    "vllm.models.hy_v4.nvidia.attention.per_token_group_quant_fp8",
}
LATER = OF_POOLS | OF_FP4 | OF_FP4_KEYS | OF_CUTEDSL_KEYS | OF_INVARIANCE | OF_E4M3  # since 0.33, if asked for
OF_LORA = {"vllm.lora.worker_manager.WorkerLoRAManager"}
CLASSES = {
    "DeepseekV32IndexerBackend", "DeepseekV32IndexerCache", "DeepSeekV2FusedQkvAProjLinear", "Worker",
    "WorkerLoRAManager",
}  # fmt: skip


# What functions take of which the replacement takes something.
TAKES = {
    "_get_backend_priorities": ("use_mla", "device_capability"), "_select_dsv4_attn_cls": ("vllm_config",),
    "sparse_attn_indexer": sorted(indexer.ARGUMENTS.read | indexer.ARGUMENTS.unread),
    "_hc_prenorm_gemm_outputs": ("x", "fn"),
    "sparse_attn_indexer_kpool": sorted(pools.ARGUMENTS.read | pools.ARGUMENTS.unread),
}  # fmt: skip


# Of functions with the parameters of vLLM's.
TAKES |= {
    name: [*inspect.signature(getattr(without_e4m3, name)).parameters]
    for name in (target.rpartition(".")[2] for target in OF_E4M3)
}
TAKES[QUANTIZE] = [*TAKES[QUANTIZE], "use_fp4"]
TAKES["dsa_indexer_uses_fp4"] = ["vllm_config"]


# Methods of vLLM's classes that are replaced.
METHODS = {
    "Worker": ("load_model", "determine_available_memory", "compile_or_warm_up_model", "execute_model"),
    "WorkerLoRAManager": ("_load_adapter",),
}  # fmt: skip


def stand_in(name: str) -> Any:
    """A function, or a class, that can be patched."""
    if name not in CLASSES:
        return taking(name, *TAKES.get(name, ()))
    return type(name, (), {method: taking(method, "self") for method in METHODS.get(name, ())})


def taking(name: str, *parameters: str, **defaults: Any) -> Any:
    """A function of these parameters."""

    def function(*args: Any, **kwargs: Any) -> str:
        return name

    function.__name__ = name
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [inspect.Parameter(each, kind) for each in parameters]
    given += [inspect.Parameter(each, kind, default=default) for each, default in defaults.items()]
    vars(function)["__signature__"] = inspect.Signature(given)
    return function


def read_in_033() -> dict[str, dict[str, Any]]:
    """Modules with the classes whose fields the plugin reads, and whose methods it overrides."""
    found: dict[str, dict[str, Any]] = {}
    fields: dict[tuple[str, str], list[str]] = {}
    for read in contract.FIELDS:
        fields.setdefault((read.module, read.name), []).extend(read.fields)
    for (module, name), names in fields.items():
        found.setdefault(module, {})[name] = make_dataclass(name, ["more", *names])
    for method in contract.METHODS:
        owner, _, name = method.name.partition(".")
        members = found.setdefault(method.module, {})
        members.setdefault(owner, type(owner, (), {}))
        setattr(members[owner], name, taking(name, *method.parameters, "later"))
    return found


class Plugin:
    """The plugin's patches, imported above the stand-ins, and the functions that they have replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
        self.path: str | None = None
        self.has_deep_gemm = True
        self.ops: list[tuple[Any, ...]] = []
        custom = SimpleNamespace(is_overridden=lambda: self.path is not None, get_path=lambda: self.path)
        platform = SimpleNamespace(is_cuda=lambda: cuda, dispatch_key="CUDA" if cuda else "CPU")
        modules: dict[str, dict[str, Any]] = {
            "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda function: function},
            "vllm.logger": {"init_logger": getLogger},
            "vllm.platforms": {"current_platform": platform},
            "vllm.utils.deep_gemm": {"is_deep_gemm_supported": lambda: self.has_deep_gemm},
            "vllm.utils.torch_utils": {"vllm_lib": SimpleNamespace(impl=lambda *a, **k: self.ops.append((*a, k)))},
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": SimpleNamespace(CUSTOM=custom),
                "register_backend": lambda _, path: setattr(self, "path", path),
            },
        }
        for target in EVERY | SINCE_033 | LATER | OF_LORA | OTHERS:
            module, _, name = target.removeprefix("*").rpartition(".")
            modules.setdefault(module, {})[name] = stand_in(name)
        for name, members in read_in_033().items():
            modules.setdefault(name, {}).update(members)
        self.modules: dict[str, Any] = {}
        for name, members in modules.items():
            self.modules[name] = ModuleType(name)
            vars(self.modules[name]).update(members)
            monkeypatch.setitem(sys.modules, name, self.modules[name])
        monkeypatch.delitem(sys.modules, "xmla.vllm.patches", raising=False)
        self.patches: Any = importlib.import_module("xmla.vllm.patches")
        self.made: list[str] = []
        apply: Callable[..., None] = self.patches.apply

        def note(patch: Any, release: str) -> None:
            apply(patch, release)
            self.made.append(f"{patch.module}.{patch.name}")

        monkeypatch.setattr(self.patches, "apply", note)


@pytest.fixture(params=[True, False], ids=["cuda", "cpu"])
def cuda(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> Any:
    yield Plugin(monkeypatch, cuda)
    import xmla.vllm

    sys.modules.pop("xmla.vllm.patches", None)  # it holds the stand-ins
    with suppress(AttributeError):
        del xmla.vllm.patches


def of(release: str, *targets: set[str], cuda: bool = True) -> set[str]:
    """The functions among `targets` that are replaced."""
    every = set().union(*targets) - (set() if Version(release) >= Version("0.33") else SINCE_033 | LATER)
    return {target.removeprefix("*") for target in every if cuda or not target.startswith("*")}


@pytest.mark.parametrize("release", [f"{release}.0" for release in TESTED] + ["0.33.1"])
def test_each_release_has_the_changes_that_are_for_it(plugin: Plugin, release: str, cuda: bool) -> None:
    plugin.patches.install(release)
    assert sorted(plugin.made) == sorted(of(release, EVERY, SINCE_033, cuda=cuda)), "each once"
    assert plugin.path == plugin.patches.BACKEND
    kernel = plugin.modules[INDEXER].sparse_attn_indexer
    key = {"dispatch_key": "CUDA" if cuda else "CPU", "allow_override": True}
    assert plugin.ops == [("sparse_attn_indexer", kernel, key)], "the op is the function that took its place"
    plugin.patches.install(release)
    assert len(plugin.ops) == 1, "once in a process"


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_changes_of_one_model_or_mode_are_made_when_asked_for(plugin: Plugin, release: str) -> None:
    groups = {
        "POOL_PATCHES": OF_POOLS, "E4M3_PATCHES": OF_E4M3, "FP4_PATCHES": OF_FP4, "INVARIANCE_PATCHES": OF_INVARIANCE,
        "LORA_PATCHES": OF_LORA, "FP4_KEY_PATCHES": OF_FP4_KEYS, "CUTEDSL_FP4_KEY_PATCHES": OF_CUTEDSL_KEYS,
    }  # fmt: skip
    for patches, targets in groups.items():
        for _ in range(2):
            plugin.patches.apply_all(getattr(plugin.patches, patches), release)
        assert sorted(plugin.made) == sorted(of(release, targets)), "each once"
        plugin.made.clear()


def test_what_is_not_there_is_told(plugin: Plugin) -> None:
    del plugin.modules[INDEXER].has_deep_gemm
    with pytest.raises(UnsupportedError) as refused:
        plugin.patches.install("0.33.0")
    said = str(refused.value)
    assert said.startswith(f"xmla.vllm: vLLM 0.33.0 has no {INDEXER}.has_deep_gemm, which xmla replaces (")
    assert plugin.path is None


def test_a_model_that_was_imported_before_is_told(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    early: Any = ModuleType("vllm.models.early")
    early.sparse_attn_indexer = plugin.modules[INDEXER].sparse_attn_indexer
    monkeypatch.setitem(sys.modules, early.__name__, early)
    message = r"^xmla\.vllm: vllm\.models\.early imported vLLM's sparse_attn_indexer before the plugin$"
    with pytest.raises(UnsupportedError, match=message):
        plugin.patches.install("0.33.0")


def test_a_worker_of_a_users_that_was_made_before_is_changed_too(plugin: Plugin, cuda: bool) -> None:
    """Its refusals would else be lost without a word."""
    worker = plugin.modules["vllm.v1.worker.gpu_worker"].Worker
    own = type("OwnWorker", (worker,), {})
    plugin.patches.install("0.33.0")
    whose = {getattr(own, method).__module__.partition(".")[0] for method in METHODS["Worker"]}
    assert whose == ({"xmla"} if cuda else {__name__})


def test_a_worker_without_a_method_is_told(plugin: Plugin, cuda: bool) -> None:
    del plugin.modules["vllm.v1.worker.gpu_worker"].Worker.execute_model
    if not cuda:  # nothing of it is replaced
        return
    told = r"vLLM 0\.33\.0 has no vllm\.v1\.worker\.gpu_worker\.Worker, which xmla replaces \(.*'execute_model'\); "
    with pytest.raises(UnsupportedError, match=told):
        plugin.patches.install("0.33.0")


def test_the_first_layer_mhc_without_deep_gemm(plugin: Plugin) -> None:
    """vLLM's function, but where it would call DeepGEMM, which does not serve the GPU."""
    outputs = plugin.patches.without_deep_gemm(lambda x, fn, **asked: asked)
    x, fn = torch.randn(5, 16).bfloat16(), torch.randn(8, 16)
    sizes = {"hidden_size": 16, "hc_mult": 2}
    for fallback, there in ((True, True), (True, False), (False, True)):
        plugin.has_deep_gemm = there
        assert outputs(x, fn, use_tilelang_fallback=fallback, **sizes) == sizes | {"use_tilelang_fallback": fallback}
    plugin.has_deep_gemm = False
    product, squares = outputs(x, fn, use_tilelang_fallback=False, **sizes)
    assert torch.allclose(product[0].double(), x.double() @ fn.double().T, atol=1e-5)
    assert torch.allclose(squares[0].double(), x.double().square().sum(1))


def changed(plugin: Plugin, patch: str, function: Any) -> str:
    """What is said at install when a function of vLLM is another; nothing is registered then."""
    module, _, name = patch.rpartition(".")
    setattr(plugin.modules[module], name, function)
    with pytest.raises(UnsupportedError) as refused:
        plugin.patches.install("0.33.0")
    assert plugin.path is None
    return str(refused.value)


ENDING = "; without xmla in VLLM_PLUGINS vLLM serves with its own kernels"
OP = f"{INDEXER}.sparse_attn_indexer"


def test_a_function_with_other_parameters_is_told(plugin: Plugin) -> None:
    name = f"{V4}.nvidia.model._select_dsv4_attn_cls"
    assert changed(plugin, name, taking("f", "model", "device")) == (
        f"xmla.vllm: {name} of vLLM 0.33.0 has the parameters (model, device), expected (vllm_config) as the first"
        + ENDING
    )


def test_an_op_that_lost_an_argument_is_told(plugin: Plugin) -> None:
    parameters = [name for name in TAKES["sparse_attn_indexer"] if name != "kv_cache"]
    told = "xmla.vllm: vLLM's sparse_attn_indexer has no argument kv_cache, which xmla reads"
    assert changed(plugin, OP, taking("sparse_attn_indexer", *parameters)) == told + ENDING


def test_an_op_with_an_argument_more_is_told(plugin: Plugin) -> None:
    function = taking("sparse_attn_indexer", *TAKES["sparse_attn_indexer"], "window")
    told = "xmla.vllm: vLLM's sparse_attn_indexer has an argument window without a default, which xmla does not know"
    assert changed(plugin, OP, function) == told + ENDING


def test_an_unknown_argument_is_served_by_its_default_alone(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "run", lambda call: sorted(call))
    original = taking("sparse_attn_indexer", *TAKES["sparse_attn_indexer"], window=None, sinks=4)
    op = plugin.patches.op_by_keywords(indexer)(original)
    arguments = dict.fromkeys(TAKES["sparse_attn_indexer"])
    for more in ({}, {"window": None}, {"sinks": 4}):
        assert op(**arguments, **more) == sorted([*arguments, "window", "sinks"])
    for more in ({"window": ()}, {"sinks": 0}):
        told = f"^xmla.vllm: not served: the argument {next(iter(more))} of sparse_attn_indexer{ENDING}$"
        with pytest.raises(UnsupportedError, match=told):
            op(**arguments, **more)


def test_a_field_that_is_not_there_is_told(plugin: Plugin) -> None:
    name = "DeepseekV32IndexerPrefillChunkMetadata"
    assert changed(plugin, f"{BACKEND}.{name}", make_dataclass(name, ["block_table"])) == (
        f"xmla.vllm: {BACKEND}.{name} of vLLM 0.33.0 has no field cu_seqlen_ks, which xmla reads{ENDING}"
    )


def test_a_method_with_other_parameters_is_told(plugin: Plugin) -> None:
    class MLAAttentionImpl:
        def forward_mqa(self, query: Any, cache: Any) -> None: ...

    name = "vllm.v1.attention.backend.MLAAttentionImpl"
    assert changed(plugin, name, MLAAttentionImpl).startswith(
        f"xmla.vllm: {name}.forward_mqa of vLLM 0.33.0 has the parameters (self, query, cache), expected (self, q, "
    )


def test_a_class_that_is_not_there_is_told(plugin: Plugin) -> None:
    del plugin.modules["vllm.v1.attention.backend"].CommonAttentionMetadata
    with pytest.raises(UnsupportedError, match=r" vllm\.v1\.attention\.backend\.CommonAttentionMetadata, which "):
        plugin.patches.install("0.33.0")


# By file of the plugin, the variables that hold vLLM's metadata.
HELD = {
    "indexer.py": {
        "step": "DeepseekV32IndexerMetadata", "step.decode": "DeepSeekV32IndexerDecodeMetadata",
        "decode": "DeepSeekV32IndexerDecodeMetadata", "step.prefill": "DeepseekV32IndexerPrefillMetadata",
        "chunk": "DeepseekV32IndexerPrefillChunkMetadata", "attention": "FlashMLASparseMetadata",
    },
    "pools.py": {
        "step": "DeepseekV32IndexerMetadata", "tail": "DeepseekV32IndexerMetadata",
        "step.decode": "DeepSeekV32IndexerDecodeMetadata", "decode": "DeepSeekV32IndexerDecodeMetadata",
    },
    "backend.py": {
        "metadata": "FlashMLASparseMetadata", "attn_metadata": "FlashMLASparseMetadata",
        "common_attn_metadata": "CommonAttentionMetadata",
    },
    "attention_v4_base.py": {"step": "DeepseekSparseSWAMetadata", "compressed": "DeepseekV4FlashMLAMetadata"},
    "attention_v4.py": {"compressed": "DeepseekV4FlashMLAMetadata"},
    "recording.py": {"step": "SchedulerOutput", "new": "NewRequestData", "known": "CachedRequestData"},
}  # fmt: skip


def test_every_field_that_is_read_is_compared() -> None:
    compared: dict[str, set[str]] = {}
    for read in contract.FIELDS:
        compared.setdefault(read.name, set()).update(read.fields)
    seen: dict[str, set[str]] = {}
    for file, held in HELD.items():
        tree = ast.parse((Path(contract.__file__).parent / file).read_text())
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Attribute)):
            if isinstance(node.ctx, ast.Load) and (owner := held.get(ast.unparse(node.value))):
                seen.setdefault(owner, set()).add(node.attr)
    seen["FlashMLASparseMetadata"] -= {"gathered"}  # xmla's own
    assert {owner: sorted(names) for owner, names in seen.items()} == {
        owner: sorted(names) for owner, names in compared.items()
    }
