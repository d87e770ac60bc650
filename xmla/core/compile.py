"""Compiles a plan's kernels for any architecture, with or without a GPU, as both front-ends' launchers would."""

from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from xmla.core.plan import COMPILE_OPTIONS, Launch, Plan
from xmla.core.spec import DTYPES, Spec


def compile_launch(launch: Launch, plan: Plan, specs: Mapping[str, Spec], arch: int) -> CompiledKernel:
    """The kernel of one launch for compute capability `arch`; `specs` are those of the call's arguments.

    Pointers are taken as 16-byte aligned, which frameworks' allocators guarantee; runtime sizes as arbitrary.
    """
    arrays = {**specs, **plan.buffers}
    constexprs = dict(launch.constexprs)
    kinds = [f"*{DTYPES[arrays[name].dtype][1]}" for name in launch.inputs]
    kinds += ["i32"] * len(launch.sizes)
    kinds += [f"*{DTYPES[arrays[name].dtype][1]}" for name in launch.outputs]
    runtime = [name for name in launch.kernel.arg_names if name not in constexprs]
    signature = dict(zip(runtime, kinds, strict=True)) | dict.fromkeys(constexprs, "constexpr")
    positions = {name: (launch.kernel.arg_names.index(name),) for name in signature}
    source = ASTSource(
        fn=launch.kernel,
        signature=signature,
        constexprs={positions[name]: value for name, value in constexprs.items()},
        attrs={positions[n]: [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")},
    )
    options = {**launch.options(), **COMPILE_OPTIONS}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
