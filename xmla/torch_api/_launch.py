"""Launches compiled kernels; everything that can be computed before the launch is.

`CompiledKernel.run` is Triton's own launch. For the CUDA launcher of Triton 3.7 to 3.9 this module calls only the part
that launches, without the scratch memory that no kernel here needs and the constexprs that the launcher skips: a third
of the host time of a launch. With any other launcher it calls `run` unchanged.
"""

from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.compiler import CompiledKernel

# (stream, metadata for profilers, their hooks, runtime arguments): pointers as integers, then sizes, then pointers.
Start = Callable[[int, Any, Any, Any, tuple[int, ...]], None]

NEEDED = ("launch", "launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature")


def starter(kernel: CompiledKernel, programs: int, constexprs: tuple[Any, ...], early: bool) -> Start:
    """Load `kernel` onto the current device; return a function that launches `programs` of it.

    `early`: it may start before the launch before it has ended.
    """
    kernel._init_handles()  # `run` itself tries to load it only once, even if that fails
    run: Any = kernel.run
    function, packed = kernel.function, kernel.packed_metadata
    more = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    more = more or getattr(run, "gsan_enabled", False)  # Triton's sanitizer passes arguments of its own
    if more or not all(hasattr(run, name) for name in NEEDED):

        def start(stream: int, metadata: Any, enter: Any, leave: Any, arguments: tuple[int, ...]) -> None:
            run(programs, 1, 1, stream, function, packed, metadata, enter, leave, *arguments, *constexprs)

        return start

    launch, signature = run.launch, run.kernel_signature
    cooperative = run.launch_cooperative_grid
    annotations = run.arg_annotations[: len(run.arg_annotations) - len(constexprs)]

    def start(stream: int, metadata: Any, enter: Any, leave: Any, arguments: tuple[int, ...]) -> None:
        launch(
            programs, 1, 1, stream, function, cooperative, early, packed, metadata, enter, leave, None, None,
            annotations, signature, arguments,
        )  # fmt: skip

    return start


def profiler_hooks() -> tuple[Any, Any]:
    """Triton's launch hooks, or None for both without a profiler: calling empty hooks costs as much as a launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return (enter, leave) if enter.calls or leave.calls else (None, None)
