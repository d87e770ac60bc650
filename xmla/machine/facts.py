"""Versions, devices and settings of this machine: for `xmla info`, and beside every measured figure."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import distributions, entry_points
from importlib.util import find_spec

from xmla import __version__
from xmla._frameworks import LAUNCHERS, missing, needed
from xmla._frameworks import PACKAGES as FRAMEWORKS
from xmla.core.config import variables
from xmla.core.registry import registry
from xmla.core.support import supports
from xmla.core.values import Device
from xmla.core.versions import installed, untested
from xmla.machine.environment import HAS_GPU

# NVIDIA's and JAX's distributions that hold CUDA, by the starts of their names, which often end in CUDA's version.
OF_CUDA = ("nvidia-cuda-runtime", "nvidia-cudnn", "nvidia-nccl", "jax-cuda")
# The files of Triton's cache that launch kernels.
COMPILED = {"torch": "xmla_launcher.", "jax": "launcher.so"}
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


def _driver() -> list[str]:
    """Each GPU's name, UUID and driver, as the driver's own program tells them: no framework does."""
    if shutil.which("nvidia-smi") is None:
        return ["not known: there is no nvidia-smi"]
    command = ["nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"not known: {error}"]
    return (done.stdout.splitlines() if done.returncode == 0 else []) or [
        f"not known: nvidia-smi says {(done.stdout + done.stderr).strip() or 'nothing'}"
    ]


def _cuda() -> list[str]:
    """The packages that hold CUDA's libraries, and the versions that torch was built with, which may come from none."""
    packages = {d.name: d.version for d in distributions() if (d.name or "").startswith(OF_CUDA)}
    libraries = [f"{name} {version}" for name, version in sorted(packages.items())]
    if not missing("torch"):
        import torch

        if torch.version.cuda is not None:
            has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
            nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none"
            cudnn = torch.backends.cudnn.version() or "none"
            libraries.append(f"torch's: CUDA {torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}")
    return libraries or ["none"]


def _triton_cache() -> list[str]:
    """Triton's cache of compiled kernels: its folder, its size, and which launchers the wheel or it has."""
    from triton import knobs

    paths = [os.path.join(folder, name) for folder, _, names in os.walk(knobs.cache.dir) for name in names]
    sizes = [os.path.getsize(path) for path in paths if os.path.isfile(path)]
    lines = [knobs.cache.dir, f"{sum(sizes) / 2**20:.1f} MiB in {len(sizes)} files"]
    for framework, start in COMPILED.items():
        there = any(os.path.basename(path).startswith(start) for path in paths)
        state = "the wheel's" if LAUNCHERS[framework].exists() else "compiled" if there else "not compiled yet"
        lines.append(f"{framework}'s launcher: {state}")
    return lines


def _compilers() -> list[str]:
    """What the launchers are compiled with; without one calls take longer."""
    return [
        f"{language}: {os.environ.get(variable) or next(filter(None, map(shutil.which, names)), 'none')}"
        for language, variable, names in (
            ("C, for torch's launcher", "CC", ("gcc", "clang")),
            ("C++, for JAX's launcher", "CXX", ("c++", "g++", "clang++")),
        )
    ]


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
    if any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins")):
        advice.append("JAX_PLATFORMS=cpu: JAX's CUDA plugin, which is installed, ends the process without a GPU")
    return advice


def collect() -> dict[str, str | list[str]]:
    """What a bug report needs, by name."""
    versions = {package: installed(package) or "not installed" for package in PACKAGES}
    return {
        "xmla": __version__,
        "python": platform.python_version(),
        **versions,
        "devices": _devices() or ["none"],
        "driver": _driver(),
        "CUDA": _cuda(),
        "kernels": "compiled" if HAS_GPU else "interpreted",
        "your programs must set": _needed_of_programs(),
        "supported": _supported(),
        "untested": untested() or ["nothing: every version is one that xmla is tested with"],
        "Triton's cache": _triton_cache(),
        "compilers": _compilers(),
        "settings": [f"{variable}={value}" for variable, _, value in variables()],
    }
