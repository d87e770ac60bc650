"""Kernels in one file: compiled on one machine, put into Triton's cache on disk on another.

Triton looks a kernel up by a hash of its sources, of what the call is compiled for, and of what `facts` and `options`
tell. No part of it is asked of a GPU: a kernel that is compiled without one has the key that a call on it computes.
Both front-ends take their kernels from there.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import triton
from packaging.version import Version
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_manager, triton_key

from xmla.core.compile.compiler import Specialization, compiled, is_whole, ptx_option, reason_of, target_of
from xmla.core.errors import ArgumentError, CompileError, UnsupportedError
from xmla.core.values import Device

CORE = Path(__file__).parent.parent
MANIFEST = "manifest.json"
# A kernel's file by Triton's key and its name there, which names no other folder.
MEMBER = re.compile(r"([0-9a-f]{64})/([A-Za-z0-9_]+\.[a-z]+)")

Files = dict[str, bytes]


def check_steady_keys() -> None:
    """Refuse Triton 3.7, whose key of a kernel differs between processes that meet kernels in another order.

    What a function calls counts there only if it was met before.

    Raises:
        UnsupportedError: This is Triton 3.7.
    """
    if Version(triton.__version__) < Version("3.8"):
        why = "its keys of kernels differ from process to process"
        raise UnsupportedError(f"warmup: Triton is {triton.__version__}, packs need 3.8 or newer: {why}")


def facts(device: Device) -> dict[str, Any]:
    """What has to be the same where a pack is used, by name.

    Of `device` and xmla's sources also which kernels there are, which plans choose; the rest is in Triton's keys.
    """
    ptxas = make_backend(target_of(device.arch)).hash().rpartition("-")[0].splitlines()[-1]  # its build, of all it says
    sources = [path.relative_to(CORE).as_posix().encode() + path.read_bytes() for path in sorted(CORE.rglob("*.py"))]
    return {
        "xmla": import_module("xmla").__version__,  # which imports this module
        "xmla's sources": _digest(b"".join(sources)),
        "Triton": triton.__version__,
        "Triton's files": _digest(triton_key().encode()),
        "ptxas": ptxas,
        "compute capability": device.arch / 10,
        "SMs": device.num_sms,
    }


def options(arch: int) -> dict[str, str]:
    """The compiler's options beside a launch's own, and the environment that Triton counts, by name.

    They follow from what `facts` tells but for variables, such as PTXAS_OPTIONS and TRITON_LIBDEVICE_PATH.
    """
    parsed = make_backend(target_of(arch)).parse_options({"enable_fp_fusion": True} | ptx_option(arch))
    values = dict(vars(parsed))
    libraries = {name: _digest(Path(path).read_bytes()) for name, path in values.pop("extern_libs")}
    return {name: str(value) for name, value in {**values, **libraries, **get_cache_invalidating_env_vars()}.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def write_pack(file: Path, kernels: Iterable[Specialization], device: Device) -> None:
    """Write kernels that this process has compiled for `device`, and what they are for, into one file."""
    built = {kernel.hash: kernel for kernel in (compiled(each, device.arch) for each in kernels)}
    manifest = {"device": device.name, "facts": facts(device), "options": options(device.arch)}
    with ZipFile(file, "w", ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
        for key, kernel in built.items():
            for name, path in kernel.metadata_group.items():
                archive.write(path, f"{key}/{name}")


def read_pack(file: Path, device: Device) -> int:
    """Put the kernels that `write_pack` wrote into Triton's cache on disk; how many they are.

    Raises:
        ArgumentError: The file is another one, or damaged.
        UnsupportedError: It is not what this xmla and this Triton compile for `device`.
        CompileError: The cache cannot be written.
    """
    manifest, kernels = _read(file)
    for part, here in (("facts", facts(device)), ("options", options(device.arch))):
        there = manifest[part]
        others = [
            f"{name} is {there.get(name)}, expected {here.get(name)}"
            for name in {**here, **there}  # a variable may be set there alone
            if there.get(name) != here.get(name)
        ]
        if others:
            raise UnsupportedError(f"warmup: {file} was packed for something else: {'; '.join(others)}")
    try:
        for key, files in kernels.items():
            manager = get_cache_manager(key)
            paths = {name: manager.put(content, name) for name, content in files.items()}
            # Last, with the paths of this machine: a kernel is there once Triton finds its group.
            manager.put_group(next(name for name in files if name.endswith(".json")), paths)
    except OSError as error:
        raise CompileError(f"warmup: kernels of {file} were not stored: {reason_of(error)}") from error
    return len(kernels)


def _read(file: Path) -> tuple[Mapping[str, dict[str, Any]], Mapping[str, Files]]:
    """What a pack is for, and the files of each kernel by its key; all of it is read before anything is stored."""
    kernels: defaultdict[str, Files] = defaultdict(dict)
    try:
        with ZipFile(file) as archive:
            content = json.loads(archive.read(MANIFEST))
            manifest = {part: dict(content[part]) for part in ("facts", "options")}
            for name in archive.namelist():
                if member := MEMBER.fullmatch(name):
                    kernels[member[1]][member[2]] = archive.read(name)
                elif name != MANIFEST:
                    raise ValueError(f"{name!r} is no kernel's file")
        for key, files in kernels.items():
            by_kind = {name.rpartition(".")[2]: content for name, content in files.items()}
            if json.loads(by_kind["json"])["hash"] != key or not is_whole(by_kind["cubin"]):
                raise ValueError(f"kernel {key} is not whole")
    except Exception as error:  # whatever an archive that is none gives
        raise ArgumentError(f"warmup: {file} is not what `xmla warmup --pack` writes, or damaged: {error!r}") from error
    return manifest, kernels
