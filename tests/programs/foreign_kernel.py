"""A jax-triton kernel that is not xmla's is lowered for Hopper to the same program before and after an op of xmla.

A script of its own, for a process without the interpreter; no GPU is needed. Prints how many kernels xmla compiled.
    JAX_PLATFORMS=cpu python tests/programs/foreign_kernel.py
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

import xmla
from xmla import jax_api
from xmla.core.config import settings
from xmla.core.values import H100, assume_device

CUSTOM_CALL = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")
VECTOR = jax.ShapeDtypeStruct((4096,), jnp.float32)
OPTIONS = {"enable_fp_fusion": False, "num_ctas": 2, "num_warps": 8, "num_stages": 1, "maxnreg": 64}


@triton.jit
def axpy_kernel(a_ptr, x_ptr, y_ptr, n, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    product = tl.load(a_ptr + offs, mask=offs < n) * tl.load(x_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, product + tl.load(y_ptr + offs, mask=offs < n), mask=offs < n)


@jax.jit
def axpy(a: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jax_triton.triton_call(
        a, x, y, 4096, kernel=axpy_kernel, out_type=VECTOR, grid=(1,), N=4096, compute_capability=90,
        backend_options=OPTIONS,
    )  # fmt: skip


def lowered() -> str:
    """The program but for its places in files, with the kernel's PTX and launch, as if the kernel was met just now."""
    vars(axpy_kernel).get("_jT_kernel_cache", {}).clear()
    jax.clear_caches()
    exported = jax.export.export(axpy, platforms=("cuda",), disabled_checks=(CUSTOM_CALL,))
    lines = exported(VECTOR, VECTOR, VECTOR).mlir_module().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#loc"))


def main() -> None:
    before = lowered()
    with assume_device(H100):
        rows, ends = jax.ShapeDtypeStruct((2, 9), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
        select = jax.jit(lambda x, e: jax_api.select_topk(x, e, k=2))
        jax.export.export(select, platforms=("cuda",), disabled_checks=(CUSTOM_CALL,))(rows, ends)
    compiled = len(xmla.compiles())
    settings.forbid_jit = True
    assert lowered() == before, "a kernel that is not xmla's is lowered to another program after an op"
    assert len(xmla.compiles()) == compiled
    print(compiled)


if __name__ == "__main__":
    main()
