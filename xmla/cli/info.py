"""`xmla info`."""

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from xmla import __version__
from xmla.cli._environment import HAS_GPU
from xmla.core.config import variables

PACKAGES = ("triton", "numpy", "ml_dtypes", "torch", "jax", "jax-triton", "transformers")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{p.name} (sm_{p.major}{p.minor}, {p.multi_processor_count} SMs)" for p in found]


def _supported() -> list[str]:
    """What works here beside the ops themselves, and why what does not."""
    facts = []
    for framework, needs in (("torch", ("torch",)), ("jax", ("jax", "jax-triton"))):
        missing = [package for package in needs if _version(package) == "not installed"]
        facts.append(f"{framework}: {'yes' if not missing else 'no, ' + ' and '.join(missing) + ' not installed'}")
    facts.append(f"compiled kernels: {'yes' if HAS_GPU else 'no, no GPU; CPU arrays are interpreted'}")
    peer = find_spec("flash_mla") is not None
    facts.append(f"FlashMLA as a baseline: {'yes' if peer else 'no, flash_mla not installed'}")
    return facts


def collect() -> dict[str, str | list[str]]:
    """What a bug report needs, by name."""
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "xmla": __version__,
        "python": platform.python_version(),
        **versions,
        "devices": _devices() or ["none"],
        "kernels": "compiled" if HAS_GPU else "interpreted",
        "supported": _supported(),
        "settings": [f"{variable}={value}" for variable, _, value in variables()],
    }
