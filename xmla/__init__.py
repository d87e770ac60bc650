"""DeepSeek sparse attention for PyTorch and JAX from one set of Triton kernels.

Import a front-end: ``xmla.torch_api`` or ``xmla.jax_api``. This module imports neither framework, and Triton only when
one of its names is asked for: the `xmla` command chooses Triton's interpreter before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmla import layouts as layouts
    from xmla._warmup import Warmup as Warmup
    from xmla._warmup import warmup as warmup
    from xmla.core.device import Device as Device
    from xmla.core.errors import ArgumentError as ArgumentError
    from xmla.core.errors import CompileError as CompileError
    from xmla.core.errors import UnsupportedError as UnsupportedError
    from xmla.core.model import ModelConfig as ModelConfig
    from xmla.core.model_v4 import ModelConfigV4 as ModelConfigV4
    from xmla.core.support import Support as Support
    from xmla.core.support import supports as supports

__version__ = "0.1.0"

_MODULES = {
    "ArgumentError": "core.errors",
    "CompileError": "core.errors",
    "Device": "core.device",
    "ModelConfig": "core.model",
    "ModelConfigV4": "core.model_v4",
    "Support": "core.support",
    "UnsupportedError": "core.errors",
    "Warmup": "_warmup",
    "supports": "core.support",
    "warmup": "_warmup",
}


def __getattr__(name: str) -> Any:
    if name == "layouts":
        return import_module("xmla.layouts")
    if name not in _MODULES:
        raise AttributeError(f"module 'xmla' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"xmla.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "layouts"})
