"""JAX's launcher above a driver that notes launches (launcher_on_host.cc), for tests without a GPU."""

import ctypes
import os
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from xmla.jax_api import _launcher

WARPS = 3  # of the stand-in for a compiled kernel


def build(path: Path) -> None:
    """Compile the library, or skip the test where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    headers = [jax.ffi.include_dir(), str(files("triton.backends.nvidia") / "include")]
    # Beside a GPU CUDA's driver is loaded, whose functions would take the place of the library's own.
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-Wl,-Bsymbolic", *(f"-I{header}" for header in headers)]
    source = Path(__file__).with_name("launcher_on_host.cc")
    subprocess.run([*command, str(source), "-o", str(path)], check=True, capture_output=True)


class Noting:
    """The library, registered as the custom call of the CPU, and what stands in for compiled kernels."""

    def __init__(self, path: str | os.PathLike[str], shared_bytes: int = 0) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.noted_launches.restype = ctypes.c_char_p
        self.shared_bytes = shared_bytes
        _launcher.declare(self.library)
        jax.ffi.register_ffi_target(_launcher.TARGET, jax.ffi.pycapsule(self.library.execute_on_host), platform="cpu")

    def launches(self) -> list[list[str]]:
        """The words of each launch of the last custom call."""
        return [line.split() for line in self.library.noted_launches().decode().splitlines()]

    def compiled(self, specialization: Any, _: int) -> SimpleNamespace:
        """Replaces `xmla.core.compile.compiler.compiled`."""
        name = specialization.kernel.__name__
        facts = SimpleNamespace(name=name, num_warps=WARPS, shared=self.shared_bytes, global_scratch_size=0,
                                num_ctas=specialization.num_ctas)  # fmt: skip
        return SimpleNamespace(metadata=facts, asm={"cubin": name.encode()})
