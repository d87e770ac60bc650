"""XLA's GPU pipeline, for two H200s, on a machine that has none: everything but the kernels is compiled as for them.

To be imported before JAX, whose CUDA plugin crashes where it looks for a GPU.
"""

import os
import tempfile
from pathlib import Path

_folder = tempfile.TemporaryDirectory()
DUMPS = Path(_folder.name)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# Tuning needs a GPU; one thread, as other tests run beside this one.
os.environ["XLA_FLAGS"] = (
    f"--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1 --xla_dump_to={DUMPS} --xla_dump_hlo_as_text"
)

import ctypes  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import hlo  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

# Of the card, what XLA asks for: a GpuTargetConfigProto.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""

DEVICES = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x2").devices
MESH = Mesh(np.array(DEVICES), ("x",))


def register(*targets: str) -> None:
    """Give custom calls a handler that does nothing: XLA compiles none without."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "clang++"
    source, library = Path(__file__).with_name("handler.c"), DUMPS / "handler.so"
    command = [compiler, "-x", "c", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).handler)
    for target in targets:
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")


def program(
    function: Callable[..., Any], arguments: Sequence[Any], *, donated: bool = False,
    options: Mapping[str, Any] | None = None,
) -> hlo.Program:  # fmt: skip
    """A function as XLA compiles it for the devices of its arguments, the second of which may be donated."""
    jitted = jax.jit(function, donate_argnums=1 if donated else ())
    lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    for file in filter(Path.is_file, DUMPS.rglob("module_*")):  # of programs before, or that lowering ran on the CPU
        file.unlink()
    compiled = lowered.compile(dict(options) if options else None)
    assignment, values = (
        next(DUMPS.glob(f"*after_optimizations-buffer-assignment{name}.txt")).read_text() for name in ("", "-values")
    )
    return hlo.Program(compiled.as_text(), assignment, values)
