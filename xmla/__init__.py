"""DeepSeek sparse attention for PyTorch and JAX from one set of Triton kernels.

Import a front-end: ``xmla.torch_api`` or ``xmla.jax_api``. This module imports neither framework. It imports Triton
only when one of its names is used, so that the `xmla` command can choose Triton's interpreter before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xmla import layouts as layouts
    from xmla._warmup import Warmup as Warmup
    from xmla._warmup import warmup as warmup
    from xmla.core.compile import Compile as Compile
    from xmla.core.compile import compiles as compiles
    from xmla.core.device import Device as Device
    from xmla.core.errors import ArgumentError as ArgumentError
    from xmla.core.errors import CompileError as CompileError
    from xmla.core.errors import UnsupportedError as UnsupportedError
    from xmla.core.models.v4 import ModelConfigV4 as ModelConfigV4
    from xmla.core.models.v32 import ModelConfig as ModelConfig
    from xmla.core.support import Support as Support
    from xmla.core.support import supports as supports

__version__ = "0.1.0"

_MODULES = {
    "ArgumentError": "core.errors",
    "Compile": "core.compile",
    "CompileError": "core.errors",
    "Device": "core.device",
    "ModelConfig": "core.models.v32",
    "ModelConfigV4": "core.models.v4",
    "Support": "core.support",
    "UnsupportedError": "core.errors",
    "Warmup": "_warmup",
    "compiles": "core.compile",
    "supports": "core.support",
    "warmup": "_warmup",
}


if not TYPE_CHECKING:  # with it a type checker would accept every name

    def __getattr__(name):
        if name == "layouts":
            return import_module("xmla.layouts")
        if name not in _MODULES:
            raise AttributeError(f"module 'xmla' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"xmla.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "layouts"})
