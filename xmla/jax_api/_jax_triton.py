"""The only file that imports jax-triton and depends on its version (0.4.x, with JAX 0.11 and 0.12).

`import jax_triton` deletes TRITON_CACHE_DIR from the environment (0.3.1 sets it to ""); it is restored here. Two
behaviours of jax-triton would compile kernels that differ from torch's, or compile them again in every process:
  - it specialises on an integer argument that equals 1 (`_Size` equals no plain integer);
  - it compiles without Triton's cache on disk: calls with the option `_SPECIALIZATION`, as all of xmla have, take
    their kernel from `xmla.core.compile.compiler` instead (`_compile`).
"""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax

from xmla._frameworks import install
from xmla.core.compile import Specialization, compiled, specialize
from xmla.core.errors import UnsupportedError
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, Spec

_SPECIALIZATION = "xmla_specialization"


class _Size(int):
    """A runtime size: an integer that equals other `_Size`s of its value, but no plain integer."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Size) and int(self) == int(other)

    def __hash__(self) -> int:
        return hash(int(self))


@lru_cache(maxsize=1)
def _import() -> Any:
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
        from jax_triton import triton_lib
    except ImportError as error:
        raise UnsupportedError(f"GPU kernels under JAX need jax-triton 0.4.x: {install('jax')}") from error
    finally:
        if cache_dir is not None:
            os.environ["TRITON_CACHE_DIR"] = cache_dir
    theirs = getattr(triton_lib.TritonFunction, "_compile_kernel", None)
    if theirs is None:
        raise UnsupportedError(f"xmla knows jax-triton 0.4.x, this is {jax_triton.__version__}")
    if not hasattr(triton_lib.triton_kernel_call_lib, "TritonKernel"):
        raise UnsupportedError(f"GPU kernels under JAX need JAX's CUDA plugin, also where no GPU is: {install('cuda')}")

    def compile_kernel(function: Any, spec: Any, target: Any, backend: Any, options: Mapping[str, Any]) -> Any:
        if _SPECIALIZATION in options:
            return _compile(options[_SPECIALIZATION], target, backend, options)
        return theirs(function, spec, target, backend, options)

    triton_lib.TritonFunction._compile_kernel = compile_kernel  # pyrefly: ignore
    return jax_triton


def _compile(specialization: Specialization, target: Any, backend: Any, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """What jax-triton's `_compile_kernel` returns, for a kernel that `xmla.core.compile.compiler` gives."""
    from jax_triton import triton_lib

    binary = compiled(specialization, target.arch)
    facts = binary.metadata
    ir = binary.asm["ttir" if "ttir" in binary.asm else "ttgir"]  # Gluon starts one level lower
    scratch = (facts.global_scratch_size, facts.global_scratch_align) if facts.global_scratch_size else ()
    # The launch needs the warps of all partitions of a warp-specialised kernel; the options have those of the first.
    kernel = triton_lib.triton_kernel_call_lib.TritonKernel(
        facts.name, facts.num_warps, options["num_ctas"], facts.shared, binary.asm["ptx"], ir, target.arch, *scratch,
    )  # fmt: skip
    result = triton_lib.CompilationResult(
        binary=binary.asm["ptx"], name=facts.name, shared_mem_bytes=facts.shared, ttgir=binary.asm["ttgir"],
        llir=binary.asm["llir"], global_scratch_size=None, global_scratch_align=None, tensordesc_meta=(),
    )  # fmt: skip
    return kernel, ir, backend.parse_options(dict(options)), result


def launch(
    launch: Launch, plan: Plan, specs: Mapping[str, Spec], inputs: Sequence[Any], parts: Sequence[Any], device: Device
) -> list[jax.Array]:
    """One launch of `plan` inside a JAX computation; Refs among `inputs` are updated in place.

    `parts` are Refs of the outputs that other launches also write; they come before the other outputs.
    """
    jax_triton = _import()
    specialization = specialize(launch, plan, specs)
    compiled(specialization, device.arch)  # here, so that an error names the user's line
    outputs = [plan.buffers[name] for name in launch.writes[len(parts) :]]
    return jax_triton.triton_call(
        *inputs,
        *map(_Size, launch.size_values),
        *parts,
        kernel=launch.kernel,
        out_type=[jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in outputs],
        grid=launch.grid,
        name=launch.name,
        compute_capability=device.arch,
        backend_options=specialization.options() | {_SPECIALIZATION: specialization},
        **launch.constexprs,
    )
