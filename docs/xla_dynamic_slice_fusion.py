"""XLA takes a custom call that updates its operand into a fusion with the operand's slice, and forgets the update.

pip install jax jax-cuda13-plugin jax-cuda13-pjrt, and a C++ compiler; no GPU: the programs are compiled and read.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

HANDLER = """
#include "xla/ffi/api/ffi.h"
static xla::ffi::Error run(xla::ffi::RemainingArgs, xla::ffi::RemainingRets) { return xla::ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(update, run, xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets());
"""
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
"""

# [begin]
BYTES = jax.ShapeDtypeStruct((256,), jnp.uint8)


def update(row: jax.Array, effect: bool = False) -> jax.Array:
    """A typed FFI call whose first result is its operand, in place; the second is scratch memory."""
    call = jax.ffi.ffi_call("update", [BYTES, BYTES], input_output_aliases={0: 0}, has_side_effect=effect)
    return call(row)[0]


PROGRAMS = {
    "a row of the stack": lambda stack: update(stack[1]),
    "with a side effect": lambda stack: update(stack[1], effect=True),
    "behind barriers": lambda stack: jax.lax.optimization_barrier(update(jax.lax.optimization_barrier(stack[1]))),
}
# [end]


def register() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "update.so")
        options = [
            "-std=c++17",
            "-w",
            "-shared",
            "-fPIC",
            f"-I{jax.ffi.include_dir()}",
            "-x",
            "c++",
            "-",
            "-o",
            library,
        ]
        subprocess.run(["c++", *options], input=HANDLER, text=True, check=True)
        handler = jax.ffi.pycapsule(ctypes.CDLL(library)["update"])
    jax.ffi.register_ffi_target("update", handler, platform="CUDA")


def compiled_for_an_h200(program: Callable[[jax.Array], jax.Array]) -> str:
    gpu = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=H200).devices[0]
    stack = jax.ShapeDtypeStruct((3, 256), jnp.uint8, sharding=SingleDeviceSharding(gpu))
    return jax.jit(program).trace(stack).lower(lowering_platforms=("cuda",)).compile().as_text()


if __name__ == "__main__":
    register()
    for name, program in PROGRAMS.items():
        text = compiled_for_an_h200(program)
        assert "input_output_alias=" not in text.splitlines()[0]  # the stack is not donated
        calls = text.count('custom_call_target="update"')
        fusion = re.search(r"^%dynamic-slice-fusion.*?^}", text, re.MULTILINE | re.DOTALL)
        in_place = fusion and "output_to_operand_aliasing={{0}: (0, {})}" in fusion[0]
        of_the_stack = re.search(r"fusion\(%stack[.\d]*\), kind=kCustom, calls=%dynamic-slice-fusion", text)
        where = "in the caller's stack" if in_place and of_the_stack else "in an array of its own"
        print(f"JAX {jax.__version__}, {name}: calls {calls}, updates {where}")
