"""Modules for what SGLang imports and a CPU does not have: kernels for CUDA, and packages that no step calls.

V3.2's steps ask for neither DeepGEMM nor FlashMLA. SGLang imports both for V4: `install_kernels`.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks.engines import entry_points

PACKAGES = {"sgl_kernel", "flashinfer", "torchvision", "aiohttp", "IPython"}


class StandIn(ModuleType):
    """Has every name: a class for one that begins with a capital, else an object that can be called."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(patch: pytest.MonkeyPatch) -> None:
    import_module("transformers.models.llama.modeling_llama")  # would take what stands in for torchvision as installed
    patch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


def install_kernels(patch: pytest.MonkeyPatch) -> None:
    """FlashMLA with any name, and DeepGEMM's functions that V4's steps ask for, which no step may call."""

    def fp8_paged_mqa_logits(
        q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any, schedule_meta: Any,
        max_context_len: Any, clean_logits: Any = False, indices: Any = None,
    ) -> None:  # fmt: skip
        raise AssertionError("DeepGEMM's logits")

    def get_paged_mqa_logits_metadata(context_lens: Any, block_kv: Any, num_sms: Any, indices: Any = None) -> None:
        raise AssertionError("DeepGEMM's schedule")

    for name in ("flash_mla", "flash_mla.flash_mla_interface"):
        patch.setitem(sys.modules, name, StandIn(name))
    deep_gemm: Any = ModuleType("deep_gemm")
    deep_gemm.fp8_paged_mqa_logits = fp8_paged_mqa_logits
    deep_gemm.get_paged_mqa_logits_metadata = get_paged_mqa_logits_metadata
    deep_gemm.get_num_sms = lambda: 4
    patch.setitem(sys.modules, "deep_gemm", deep_gemm)


def load_plugins(patch: pytest.MonkeyPatch, named: str) -> None:
    """SGLang's own loading, in an environment that has xmla's entry points, with SGLANG_PLUGINS=`named`."""
    from sglang.srt import plugins

    found = [
        EntryPoint(name, place, group)
        for group, points in entry_points.PROJECT["entry-points"].items()
        for name, place in points.items()
    ]
    patch.setattr(plugins, "entry_points", lambda group: [point for point in found if point.group == group])
    patch.setenv("SGLANG_PLUGINS", named)
    plugins.load_plugins()
