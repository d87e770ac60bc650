"""Launches compiled kernels; everything that can be computed before the launch is.

`CompiledKernel.run` is Triton's own launch. For the CUDA launcher of Triton 3.7 to 3.9 this module calls only the part
that launches, without the scratch memory that no kernel here needs and the constexprs that the launcher skips: a third
of the host time of a launch. With any other launcher it calls `run` unchanged.

Where no profiler looks on, a plan's launches are one call of an extension in C (launcher.c). A wheel for a platform has
it; else it is compiled as Triton compiles its own: once, into its cache on disk. Without it they are made one after the
other.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.build import compile_module_from_src

from xmla._frameworks import LAUNCHERS
from xmla.core.compile import exec_function
from xmla.core.op import Start

# (programs, stream, the hooks of profilers, runtime arguments): pointers as integers, then sizes, then pointers.
Launch = Callable[[int, int, Any, Any, tuple[int, ...]], None]

NEEDED = ("launch", "launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature")

log = logging.getLogger("xmla")


def load(kernel: CompiledKernel) -> CompiledKernel:
    """The kernel, from now on loaded onto the current device."""
    kernel._init_handles()  # `run` itself tries to load it only once, even if that fails
    return kernel


def bind_launch(kernel: CompiledKernel, constexprs: tuple[Any, ...], early: bool) -> Launch:
    """The function that launches `kernel`, which is loaded.

    `early`: it may start before the launch before it has ended.
    """
    run: Any = kernel.run
    function, packed = kernel.function, kernel.packed_metadata
    if not _is_plain(run):

        def start(programs: int, stream: int, enter: Any, leave: Any, arguments: tuple[int, ...]) -> None:
            metadata = enter and kernel.launch_metadata((programs, 1, 1), stream, *arguments)
            run(programs, 1, 1, stream, function, packed, metadata, enter, leave, *arguments, *constexprs)

        return start

    launch, signature = run.launch, run.kernel_signature
    cooperative = run.launch_cooperative_grid
    annotations = run.arg_annotations[: len(run.arg_annotations) - len(constexprs)]

    def start(programs: int, stream: int, enter: Any, leave: Any, arguments: tuple[int, ...]) -> None:
        metadata = enter and kernel.launch_metadata((programs, 1, 1), stream, *arguments)
        launch(
            programs, 1, 1, stream, function, cooperative, early, packed, metadata, enter, leave, None, None,
            annotations, signature, arguments,
        )  # fmt: skip

    return start


def _is_plain(run: Any) -> bool:
    """Whether a kernel's launcher is one whose launch is known, and passes nothing but the arguments."""
    more = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    more = more or getattr(run, "gsan_enabled", False)  # Triton's sanitizer passes arguments of its own
    return not more and all(hasattr(run, name) for name in NEEDED)


@cache
def _extension() -> Any:
    """launcher.c as a module, the wheel's or compiled here; None where it cannot be compiled."""
    if LAUNCHERS["torch"].exists():
        try:
            return import_module("xmla.torch_api.xmla_launcher")
        except ImportError as error:  # a Python without its ABI, another machine's library
            log.info("the wheel's launcher of PyTorch does not load and is compiled here: %s", error)
    try:
        source = (files("xmla.torch_api") / "launcher.c").read_text()
        headers = [str(files("triton.backends.nvidia") / "include")]
        return compile_module_from_src(source, "xmla_launcher", include_dirs=headers)
    except Exception as error:  # no compiler, no headers of Python, a cache that cannot be written
        log.info("launcher.c was not compiled, so that eager calls take longer: %s", error)
        return None


# Launches by kernels that are loaded.
Loaded = Sequence[tuple[CompiledKernel, Start]]


def batch_launcher(device: int, launches: Loaded) -> Callable[[tuple[int, ...]], Callable[..., None]] | None:
    """What gives, for a call's numbers, the function that makes its launches in one call.

    That is the function of `sequential_launcher` without numbers and hooks. None where the extension or Triton's
    launcher does not serve the kernels.
    """
    runs: list[Any] = [kernel.run for kernel, _ in launches]
    if not all(_is_plain(run) and not run.launch_cooperative_grid for run in runs) or _extension() is None:
        return None
    descriptions = [
        (kernel.function, *kernel.packed_metadata, start.early, start.programs, start.arguments)
        for kernel, start in launches
    ]
    return _extension().Kernels(device, descriptions)


def sequential_launcher(launches: Loaded, inputs: int, results: int) -> Callable[..., None]:
    """The function that makes launches one after the other, of a call with so many arguments and results.

    It takes the call's numbers, a stream, profilers' hooks, the pointers of its arguments, its results and its
    workspace. It is generated: picking the arguments of a launch from a list costs as much as all other Python of the
    launch. For two launches it reads

        def launch_each(numbers, stream, enter, leave, inputs, results, workspace):
            a0, a1, = inputs
            a2 = results[0].data_ptr()
            a3 = 0 if workspace is None else workspace.data_ptr()
            start0(numbers[1], stream, enter, leave, (a0, a1, numbers[2], a3 + numbers[0], ))
            start1(numbers[3], stream, enter, leave, (a3 + numbers[0], numbers[4], numbers[5], a2, ))
    """
    lines = [f"{''.join(f'a{place}, ' for place in range(inputs))} = inputs"]
    lines += [f"a{inputs + place} = results[{place}].data_ptr()" for place in range(results)]
    lines.append(f"a{inputs + results} = 0 if workspace is None else workspace.data_ptr()")
    scope = {}
    for place, (kernel, start) in enumerate(launches):
        scope[f"start{place}"] = bind_launch(kernel, tuple(value for _, value in start.kernel.constexprs), start.early)
        values = ""
        for array, number in start.arguments:
            parts = [f"a{array}"] * (array >= 0) + [f"numbers[{number}]"] * (number >= 0)
            values += f"{' + '.join(parts)}, "
        lines.append(f"start{place}(numbers[{start.programs}], stream, enter, leave, ({values}))")
    head = "def launch_each(numbers, stream, enter, leave, inputs, results, workspace):"
    return exec_function("\n    ".join([head, *lines]), "launch_each", **scope)


def profiler_hooks() -> tuple[Any, Any]:
    """Triton's launch hooks, or None for both without a profiler: calling empty hooks costs as much as a launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return (enter, leave) if enter.calls or leave.calls else (None, None)
