"""Warm-up: compile and load kernels before the first request."""

import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from triton.runtime.interpreter import InterpretedFunction

from xmla.core.compile import Specialization, compiled, compiling_allowed, serving_begins
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.models.base import Model
from xmla.core.models.calls import Call, kernel_list
from xmla.core.op import Calls
from xmla.core.values import Attr, Device, find_device

log = logging.getLogger("xmla")
ANOTHER = "pass the device to fill the cache on disk for: device='H200', --device H200"


@dataclass(frozen=True, slots=True)
class Warmup:
    """The kernels that `warmup` compiled or loaded, and the seconds it took."""

    specializations: tuple[Specialization, ...]
    seconds: float


def present_device() -> tuple[Device, int]:
    """The current GPU and its ordinal, according to an installed framework.

    Raises:
        UnsupportedError: There is no GPU.
    """
    try:
        import torch
    except ImportError:
        pass
    else:
        if torch.cuda.is_available():
            from xmla.torch_api._arrays import device_of

            ordinal = torch.cuda.current_device()
            return device_of(torch.device("cuda", ordinal)), ordinal
    try:
        import jax
    except ImportError:
        pass
    else:
        from xmla.jax_api._run import describe

        gpus = [device for device in jax.devices() if device.platform == "gpu"]
        if gpus:
            return describe(gpus[0]), gpus[0].local_hardware_id or 0
    raise UnsupportedError(f"warmup: no GPU is present; {ANOTHER}")


def warmup(
    config: Model, device: Device | str | None = None, *, workers: int | None = None, progress: bool = True
) -> Warmup:
    """Compile every kernel that serving `config` launches, in parallel, for both PyTorch and JAX.

    The list is complete: afterwards no call within the configuration compiles, which XMLA_FORBID_JIT=1 enforces. Eager
    calls of PyTorch are planned, too.
    Compiled kernels stay in Triton's cache on disk (TRITON_CACHE_DIR), so the next process only loads them, with Triton
    3.7 most of them; several processes may fill one cache. Warm-up does not include XLA's own compilation of a jitted
    function.

    Args:
        config: The model and the sizes that occur: a `ModelConfig`, `ModelConfigV4`, `ModelConfigV41`,
            `ModelConfigGlmFlash` or `ModelConfigMistralLarge4`.
        device: Fill the cache on disk for this device, or the known one of this name, such as "H200"; it need not be
            present. Default: the current GPU; the kernels are then also loaded onto it.
        workers: Threads, by default one per CPU core.
        progress: Show a progress bar and then the kernels by name, with the seconds that compiling took. The logger
            `xmla` tells each one's whole specialisation, at INFO.

    Raises:
        ArgumentError: An argument is of another kind, there are no workers, or no known device has this name.
        UnsupportedError: There is no GPU and no device is named; kernels are interpreted in this process.
    """
    if not isinstance(config, Model):
        raise ArgumentError(
            f"warmup: config is {type(config).__name__}, expected a ModelConfig; xmla.model_config makes one of a "
            "checkpoint or of a released model's name"
        )
    workers = Attr("workers", int, True, None).plain("warmup", workers)
    if workers is not None and workers < 1:
        raise ArgumentError(f"warmup: workers is {workers}, expected at least 1")
    if isinstance(device, str):
        device = find_device(device)
    elif not isinstance(device, Device | None):
        raise ArgumentError(f"warmup: device is {type(device).__name__}, expected a Device or the name of one")
    ordinal = None
    if device is None:
        device, ordinal = present_device()
    kernels = config.kernel_list(device)
    return make_ready([*kernels.listed], kernels.planned, device, ordinal, workers=workers, progress=progress)


def make_ready(
    kernels: Sequence[Specialization], calls: Sequence[Calls], device: Device, ordinal: int | None, *,
    workers: int | None, progress: bool,
) -> Warmup:  # fmt: skip
    """Compile or load these kernels for `device`, and load them onto the GPU with this ordinal, if there is one.

    There eager calls of PyTorch that have the plans of `calls` are made ready, too.

    Raises:
        UnsupportedError: Kernels are interpreted in this process.
    """
    start = time.perf_counter()
    if any(isinstance(specialization.kernel, InterpretedFunction) for specialization in kernels):
        raise UnsupportedError("warmup: kernels are interpreted in this process; unset TRITON_INTERPRET")

    def prepare(specialization: Specialization) -> tuple[str, float]:
        begun = time.perf_counter()
        with compiling_allowed():
            compiled(specialization, device.arch, ordinal or 0)
        return specialization.kernel.__name__, time.perf_counter() - begun

    took: dict[str, list[float]] = {}
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool, Progress(transient=True, disable=not progress) as bar:
        task = bar.add_task(f"compiling for {device.name}", total=len(kernels))
        try:
            for future in as_completed([pool.submit(prepare, specialization) for specialization in kernels]):
                name, seconds = future.result()
                took.setdefault(name, []).append(seconds)
                bar.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if ordinal is not None:
        for specialization in kernels:
            compiled(specialization, device.arch, ordinal).run  # noqa: B018, loads the kernel onto the device
        plan_calls(calls, ordinal)
        serving_begins(device.arch, ordinal)
    report = Warmup(tuple(kernels), time.perf_counter() - start)
    if progress:
        console = Console(stderr=True, soft_wrap=True)
        for name, each in sorted(took.items()):
            console.print(f"{name} × {len(each)}: {sum(each):.1f} s", highlight=False, markup=False)
        console.print(f"{len(kernels)} kernels ready for {device.name} in {report.seconds:.1f} s")
    return report


def plan_calls(calls: Iterable[Calls], ordinal: int) -> None:
    """Make eager calls of PyTorch like these ready, so that none waits; JAX plans as it compiles a program."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    from xmla.torch_api._prepared import plan_ahead

    with compiling_allowed():
        for each in calls:
            plan_ahead(each, torch.device("cuda", ordinal))


def make_engine_ready(calls: Iterable[Call], device: Device, ordinal: int) -> Warmup:
    """Make an engine's kernels ready in its process of this GPU, which compiles on its share of the cores.

    Every GPU's process needs all of them. Each begins with kernels of its own, and finds the others' in Triton's cache
    on disk.
    """
    import torch

    gpus, listed = max(1, torch.cuda.device_count()), kernel_list(calls, device)
    kernels = [*listed.listed]
    in_turn = [kernel for turn in range(gpus) for kernel in kernels[(ordinal + turn) % gpus :: gpus]]
    workers = max(1, (os.cpu_count() or 1) // gpus)
    return make_ready(in_turn, listed.planned, device, ordinal, workers=workers, progress=False)
