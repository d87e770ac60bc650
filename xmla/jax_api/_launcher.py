"""A plan's launches as one XLA custom call, of a library in C++ (launcher.cc).

A wheel for a platform has the library; else it is built once per machine.

jaxlib's own custom call of a Triton kernel launches one kernel, after everything before it has ended, and copies the
kernel's text on every launch. It remains for exports, which run where xmla is not installed, and for machines without
a C++ compiler (`_jax_triton`).
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import triton
from triton.runtime.cache import get_cache_manager

from xmla._frameworks import LAUNCHERS
from xmla.core.compile import compiled, specialize
from xmla.core.errors import CompileError
from xmla.core.plan import Launch, Plan
from xmla.core.values import DTYPES, Device, Spec

log = logging.getLogger("xmla")

TARGET = "xmla_launch"
SOURCE = "launcher.cc"
COMPILERS = ("c++", "g++", "clang++")  # in this order, where CXX names none


def _build(compiler: Sequence[str]) -> str:
    """The path of the library, from Triton's cache on disk or the compiler, a program and its options."""
    source = files("xmla.jax_api") / SOURCE
    versions = [*compiler, jaxlib.__version__, triton.__version__]
    manager = get_cache_manager(hashlib.sha256(repr([source.read_text(), versions]).encode()).hexdigest())
    if (path := manager.get_file("launcher.so")) is not None:
        return path
    headers = [jax.ffi.include_dir(), str(files("triton.backends.nvidia") / "include")]
    with as_file(source) as text, tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "launcher.so")
        command = [*compiler, "-std=c++17", "-O2", "-shared", "-fPIC", *(f"-I{path}" for path in headers)]
        done = subprocess.run([*command, str(text), "-o", str(output)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(f"{shlex.join(compiler)} failed on {SOURCE}:\n{done.stderr}")
        return manager.put(output.read_bytes(), "launcher.so", binary=True)


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the types of the library's functions."""
    library.xmla_add_kernel.argtypes = [ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64,
                                        ctypes.c_uint32, ctypes.c_uint32]  # fmt: skip


def _register(path: str | Path) -> ctypes.CDLL:
    """Load the library, and make its functions XLA's custom call."""
    launcher = ctypes.CDLL(str(path))
    declare(launcher)
    stages = {stage: jax.ffi.pycapsule(launcher[f"xmla_{stage}"]) for stage in ("initialize", "execute")}
    jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")
    return launcher


@cache
def library() -> ctypes.CDLL | None:
    """The library, the wheel's or built here; None without CUDA's driver or (with a warning) a compiler of it."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # the library takes the driver's functions from there
    except OSError:
        return None
    if LAUNCHERS["jax"].exists():
        try:
            return _register(LAUNCHERS["jax"])
        except (OSError, jax.errors.JaxRuntimeError) as error:  # another machine's, or another FFI's
            log.info("the wheel's launcher of JAX does not load and is built here: %s", error)
    try:
        # As make takes it, CXX may have options, or be a program that calls the compiler.
        compiler = shlex.split(os.environ.get("CXX", "")) or [*filter(None, map(shutil.which, COMPILERS))][:1]
        if not compiler:
            raise CompileError("no C++ compiler is installed, nor named by CXX")
        return _register(_build(compiler))
    except (CompileError, OSError, ValueError) as error:
        log.warning("%s is not built, so that JAX launches every kernel by itself, which is slower: %s", SOURCE, error)
        return None


def _number(launch: Launch, plan: Plan, specs: Mapping[str, Spec], device: Device) -> int:
    """Make a launch's kernel known to the library; the number that programs name it by, the same in any process."""
    kernel = compiled(specialize(launch, plan, specs), device.arch)
    facts, cubin = kernel.metadata, kernel.asm["cubin"]
    if facts.global_scratch_size or facts.num_ctas != launch.num_ctas:
        raise RuntimeError(f"{launch.name} needs scratch memory or a cluster, which JAX's launcher does not give it")
    properties = facts.name.encode(), cubin, facts.num_warps, facts.shared
    number = int.from_bytes(hashlib.sha256(repr(properties).encode()).digest()[:8], "little", signed=True)
    name, cubin, warps, shared = properties
    library().xmla_add_kernel(number, name, cubin, len(cubin), warps, shared)  # pyrefly: ignore
    return number


def run(
    plan: Plan, arrays: Mapping[str, Any], specs: Mapping[str, Spec], mutated: Sequence[str], device: Device
) -> tuple[jax.Array, ...]:
    """The results of a plan on `arrays`, then the new values of those that it updates in place, `mutated`.

    The call has no side effects: XLA would make one that has them twice, where it copies it into a fusion.
    """
    outputs = [*(plan.buffers[name] for name in plan.results), *(specs[name] for name in mutated)]
    types = [jax.ShapeDtypeStruct(spec.shape, DTYPES[spec.dtype][0]) for spec in outputs]
    operands = [*arrays]
    places = {name: (place, 0) for place, name in enumerate([*operands, *plan.results])}
    if plan.workspace:  # whose buffers may have no bytes
        whole = len(operands) + len(types)
        places |= {name: (whole, offset) for name, offset in plan.workspace.items()}
        types.append(jax.ShapeDtypeStruct((plan.workspace_bytes,), np.uint8))
    arguments = [
        [*(places[name] for name in launch.reads), *((-1, size) for size in launch.size_values),
         *(places[name] for name in launch.writes)]
        for launch in plan.active
    ]  # fmt: skip
    aliases = {operands.index(name): len(plan.results) + i for i, name in enumerate(mutated)}
    call = jax.ffi.ffi_call(TARGET, types, input_output_aliases=aliases)
    results = call(
        *arrays.values(),
        kernels=np.array([_number(launch, plan, specs, device) for launch in plan.active], np.int64),
        programs=np.array([launch.grid[0] * launch.num_ctas for launch in plan.active], np.int32),
        early=np.array([launch.starts_early(first=place == 0) for place, launch in enumerate(plan.active)], np.int32),
        counts=np.array([len(each) for each in arguments], np.int32),
        places=np.array([place for each in arguments for place, _ in each], np.int32),
        values=np.array([value for each in arguments for _, value in each], np.int64),
        mutated=np.array([*aliases], np.int32),
        updated=np.array([*aliases.values()], np.int32),
    )
    return tuple(results[: len(plan.results) + len(mutated)])
