"""`xmla info`."""

import platform
from importlib.util import find_spec
from typing import Any

from xmla import __version__
from xmla.cli._environment import HAS_GPU
from xmla.core.config import variables
from xmla.core.versions import installed, untested

PACKAGES = ("triton", "numpy", "ml_dtypes", "torch", "jax", "jax-triton", "transformers")


def _properties() -> list[Any]:
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]


def _devices() -> list[str]:
    return [f"{p.name} (sm_{p.major}{p.minor}, {p.multi_processor_count} SMs)" for p in _properties()]


def _supported() -> list[str]:
    """What works here beside the ops themselves, and why what does not."""
    facts = []
    for framework, needs in (("torch", ("torch",)), ("jax", ("jax", "jax-triton"))):
        missing = [package for package in needs if installed(package) is None]
        facts.append(f"{framework}: {'yes' if not missing else 'no, ' + ' and '.join(missing) + ' not installed'}")
    facts.append(f"compiled kernels: {'yes' if HAS_GPU else 'no, no GPU; CPU arrays are interpreted'}")
    peer = find_spec("flash_mla") is not None
    facts.append(f"FlashMLA as a baseline: {'yes' if peer else 'no, flash_mla not installed'}")
    return facts


def collect() -> dict[str, str | list[str]]:
    """What a bug report needs, by name."""
    versions = {package: installed(package) or "not installed" for package in PACKAGES}
    return {
        "xmla": __version__,
        "python": platform.python_version(),
        **versions,
        "devices": _devices() or ["none"],
        "kernels": "compiled" if HAS_GPU else "interpreted",
        "supported": _supported(),
        "untested": untested() or ["none: every version is one that xmla is tested with"],
        "settings": [f"{variable}={value}" for variable, _, value in variables()],
    }
