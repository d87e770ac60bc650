"""Versions, devices and settings of this machine: for `xmla info`, and beside every measured figure."""

import platform
from importlib.util import find_spec

from xmla import __version__
from xmla._frameworks import PACKAGES as FRAMEWORKS
from xmla._frameworks import missing, needed
from xmla.core.config import variables
from xmla.core.device import Device
from xmla.core.registry import registry
from xmla.core.support import supports
from xmla.core.versions import installed, untested
from xmla.machine.environment import HAS_GPU

PACKAGES = ("triton", "numpy", "ml_dtypes", "torch", "jax", "jax-triton", "transformers")


def _present() -> list[Device]:
    """The GPUs, as whichever framework is installed describes them."""
    if not missing("torch"):
        import torch

        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [Device.of(p.name, p.major * 10 + p.minor, p.multi_processor_count) for p in properties]
    if not missing("jax"):
        import jax

        from xmla.jax_api._run import describe

        return [describe(device) for device in jax.devices() if device.platform == "gpu"]
    return []


def _devices() -> list[str]:
    return [f"{device.name} (sm_{device.arch}, {device.num_sms} SMs)" for device in _present()]


def _supported() -> list[str]:
    """What works here beside the ops themselves, and why what does not."""
    facts = [f"{framework}: {f'no, {needed(framework)}' if missing(framework) else 'yes'}" for framework in FRAMEWORKS]
    facts.append(f"compiled kernels: {'yes' if HAS_GPU else 'no, there is no GPU'}")
    peer = find_spec("flash_mla") is not None
    ops = [op for op in registry().values() if len(op.implementations) > 1]
    for device in _present():
        chosen = ", ".join(f"{op.name} {supports(op.name, device).implementation}" for op in ops)
        facts.append(f"kernels on {device.name}: {chosen}")
    facts.append(f"FlashMLA as a baseline: {'yes' if peer else 'no, flash_mla not installed'}")
    return facts


def _needed_of_programs() -> list[str]:
    """What this command sets for itself and a program must set before it imports triton and jax."""
    if HAS_GPU:
        return ["nothing"]
    advice = ["TRITON_INTERPRET=1: without a GPU kernels are interpreted, calls with CPU arrays raise otherwise"]
    if not missing("jax"):
        advice.append("JAX_PLATFORMS=cpu: JAX's CUDA plugin, if it is installed, crashes the process without a GPU")
    return advice


def collect() -> dict[str, str | list[str]]:
    """What a bug report needs, by name."""
    versions = {package: installed(package) or "not installed" for package in PACKAGES}
    return {
        "xmla": __version__,
        "python": platform.python_version(),
        **versions,
        "devices": _devices() or ["none"],
        "kernels": "compiled" if HAS_GPU else "interpreted",
        "your programs must set": _needed_of_programs(),
        "supported": _supported(),
        "untested": untested() or ["nothing: every version is one that xmla is tested with"],
        "settings": [
            f"{variable}={'' if value is None else value}" for variable, _, value in variables() if value != ""
        ],
    }
