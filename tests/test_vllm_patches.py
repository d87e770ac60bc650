"""Which functions the plugin replaces in each release of vLLM, above stand-ins of vLLM's modules.

tests/vllm_engine runs the engines themselves, of two releases, and not where CI does.
"""

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from logging import getLogger
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from xmla import UnsupportedError
from xmla.vllm import TESTED

INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
BACKEND = "vllm.v1.attention.backends.mla.indexer"
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
    f"{V41}.common.ops.indexer_k_store.mqa_logits_use_mx_scales",
    f"{BACKEND}._supports_native_decode",
    f"{BACKEND}.DeepseekV32IndexerBackend",
    f"{V4}.common.ops.fused_compress_quant_cache.mqa_logits_use_mx_scales",
    "*vllm.models.deepseek_v32.common.kernels.mqa_logits_use_mx_scales",
}
OF_POOLS = {
    f"{GLM}.sparse_indexer.sparse_attn_indexer_kpool",
    f"{GLM}.sparse_indexer.has_deep_gemm",
    f"{GLM}.ops.kpool_compress.mqa_logits_use_mx_scales",
}
OF_INVARIANCE = {
    "vllm.model_executor.models.deepseek_v2.DeepSeekV2FusedQkvAProjLinear",
    "vllm.models.common.ops.fused_allreduce_rms_norm._can_use_flashinfer",
}
CLASSES = {"DeepseekV32IndexerBackend", "DeepSeekV2FusedQkvAProjLinear", "Worker"}


def stand_in(name: str) -> Any:
    """A function, or a class, that can be patched."""
    return type(name, (), {}) if name in CLASSES else lambda layer=None, *, more=1: name


class Plugin:
    """The plugin's patches, imported above the stand-ins, and the functions that they have replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
        self.path: str | None = None
        self.ops: list[tuple[Any, ...]] = []
        custom = SimpleNamespace(is_overridden=lambda: self.path is not None, get_path=lambda: self.path)
        platform = SimpleNamespace(is_cuda=lambda: cuda, dispatch_key="CUDA" if cuda else "CPU")
        modules: dict[str, dict[str, Any]] = {
            "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda function: function},
            "vllm.logger": {"init_logger": getLogger},
            "vllm.platforms": {"current_platform": platform},
            "vllm.utils.torch_utils": {"vllm_lib": SimpleNamespace(impl=lambda *a, **k: self.ops.append((*a, k)))},
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": SimpleNamespace(CUSTOM=custom),
                "register_backend": lambda _, path: setattr(self, "path", path),
            },
        }
        for target in EVERY | SINCE_033 | OF_POOLS | OF_INVARIANCE:
            module, _, name = target.removeprefix("*").rpartition(".")
            modules.setdefault(module, {})[name] = stand_in(name)
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
    every = set().union(*targets) - (set() if release.startswith("0.33") else SINCE_033 | OF_POOLS | OF_INVARIANCE)
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
    for patches, targets in (("POOL_PATCHES", OF_POOLS), ("INVARIANCE_PATCHES", OF_INVARIANCE)):
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
