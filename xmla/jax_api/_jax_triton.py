"""The only file that imports jax-triton and depends on its version (0.4.x, with JAX 0.11.x).

`import jax_triton` deletes TRITON_CACHE_DIR from the environment (0.3.1 sets it to ""); it is restored here. Two
behaviours of jax-triton would compile kernels that differ from torch's, or compile them again in every process:
  - it specialises on an integer argument that equals 1 (`_Size` equals no plain integer);
  - it compiles without Triton's cache on disk (`_compile` replaces that by `xmla.core.compile`).
"""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax

from xmla.core.compile import Specialization, compiled, specialize
from xmla.core.device import Device
from xmla.core.errors import UnsupportedError
from xmla.core.plan import Launch, Plan
from xmla.core.spec import Spec


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
        raise UnsupportedError("GPU kernels under JAX need jax-triton 0.4.x: pip install 'xmla[jax]'") from error
    finally:
        if cache_dir is not None:
            os.environ["TRITON_CACHE_DIR"] = cache_dir
    if not hasattr(triton_lib.TritonFunction, "_compile_kernel"):
        raise UnsupportedError(f"xmla knows jax-triton 0.4.x, this is {jax_triton.__version__}")
    triton_lib.TritonFunction._compile_kernel = _compile  # pyrefly: ignore
    return jax_triton


def _compile(function: Any, spec: Any, target: Any, backend: Any, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Replaces jax-triton's `_compile_kernel`: returns the same, for a kernel that `xmla.core.compile` gives."""
    from jax_triton import triton_lib

    fn = function.fn
    types = tuple((name, kind) for name, kind in spec.signature.items() if kind != "constexpr")
    constexprs = tuple((name, spec.constants[name]) for name in fn.arg_names if name in spec.constants)
    specialization = Specialization(
        fn, types, constexprs, options["num_warps"], options["num_stages"], options.get("maxnreg")
    )
    made = compiled(specialization, target.arch)
    facts = made.metadata
    ir = made.asm["ttir" if "ttir" in made.asm else "ttgir"]  # Gluon starts one level lower
    scratch = (facts.global_scratch_size, facts.global_scratch_align) if facts.global_scratch_size else ()
    # The launch needs the warps of all partitions of a warp-specialised kernel; the options have those of the first.
    kernel = triton_lib.triton_kernel_call_lib.TritonKernel(
        facts.name, facts.num_warps, options["num_ctas"], facts.shared, made.asm["ptx"], ir, target.arch, *scratch,
    )  # fmt: skip
    result = triton_lib.CompilationResult(
        binary=made.asm["ptx"], name=facts.name, shared_mem_bytes=facts.shared, ttgir=made.asm["ttgir"],
        llir=made.asm["llir"], global_scratch_size=None, global_scratch_align=None, tensordesc_meta=(),
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
    options = specialization.options()
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
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        backend_options=options,
        **launch.constexprs,
    )
