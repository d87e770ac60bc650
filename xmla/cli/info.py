"""`xmla info`."""

import platform
from importlib.metadata import PackageNotFoundError, version

from xmla import __version__
from xmla.cli._environment import HAS_GPU

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


def collect() -> dict[str, str | list[str]]:
    """What a bug report needs, by name."""
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "xmla": __version__,
        "python": platform.python_version(),
        **versions,
        "devices": _devices() or ["none"],
        "kernels": "compiled" if HAS_GPU else "interpreted",
    }
