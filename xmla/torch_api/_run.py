"""Runs plans on torch tensors. A call is prepared once, and the result is kept for calls of the same shapes."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version
from triton.runtime import driver

from xmla.core.compile import CompiledKernel, compiled, specialize
from xmla.core.config import settings
from xmla.core.device import Device
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.live import shadow
from xmla.core.live.checks import check_values
from xmla.core.op import Op, plan_call
from xmla.core.plan import Plan
from xmla.core.spec import DTYPES, Spec, row_major
from xmla.torch_api import _private
from xmla.torch_api._arrays import device_of, spec_of, take, to_numpy
from xmla.torch_api._launch import Start, profiler_hooks, starter

# An op's tensor arguments in order; optional arguments may be None, the first never is.
Tensors = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A launch bound to its kernel; `arguments` picks its pointers and sizes among all of the call's."""

    kernel: CompiledKernel
    programs: int
    start: Start
    arguments: Callable[[list[int]], tuple[int, ...]]


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The function that takes the values at `places` out of a list."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)  # itemgetter makes no tuple of one


@dataclass(frozen=True, slots=True)
class Result:
    """How a result is allocated, and what a result given by the caller must satisfy."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Prepared:
    """A planned call: `steps` on a GPU, none on the CPU, where the interpreter runs `plan`.

    `same_out` compares tensors given for results with the first that were accepted.
    """

    plan: Plan
    results: tuple[Result, ...]
    workspace_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[Step, ...]
    same_out: Callable[..., bool] | None = None


def check_tensors(op: Op, tensors: Tensors) -> None:
    for name, value in zip(op.tensors, tensors, strict=True):
        if not isinstance(value, torch.Tensor) and not (value is None and name in op.optional):
            raise ArgumentError(f"{op.name}: {name} is {type(value).__name__}, expected torch.Tensor")


def check_devices(op: Op, tensors: Tensors) -> None:
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if tensor is not None and tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{op.name}: {name} device is {tensor.device}, supported: cpu and cuda")


def plan_tensors(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], device: Device | None = None, implementation: str | None = None
) -> tuple[Plan, tuple[Spec, ...]]:
    """The plan of a call on `device` (default: the tensors' device) and its results' specs, after every check."""
    check_tensors(op, tensors)
    if device is None:
        check_devices(op, tensors)
    specs = tuple(None if tensor is None else spec_of(tensor) for tensor in tensors)
    return plan_call(op, specs, attrs, device or device_of(tensors[0].device), implementation)


@dataclass(frozen=True, slots=True)
class Recent:
    """What tells a call that was made before, in a quarter of the time that its key takes.

    `given` and `absent` pick its tensors and what is None. `same` compares dtypes, shapes, strides, devices and
    dispatch keys of the given tensors with those of that call.
    """

    given: Callable[[Tensors], tuple[torch.Tensor, ...]]
    absent: Callable[[Tensors], tuple[Any, ...]]
    nothing: tuple[None, ...]
    attrs: tuple[Any, ...]
    kinds: list[type]
    implementation: str | None
    same: Callable[..., bool]
    ordinal: int
    prepared: Prepared


class Kept:
    """The prepared calls of this process: by everything that they depend on, and the last ones of each op."""

    MOST = 1 << 14  # each takes some KB
    RECENT = 8  # a model's layers differ in a few ways

    def __init__(self) -> None:
        self.prepared: dict[Any, Prepared] = {}
        self.recent: dict[str, deque[Recent]] = {}

    def add(self, key: Any, prepared: Prepared) -> None:
        if len(self.prepared) >= self.MOST:
            self.clear()
        self.prepared[key] = prepared

    def clear(self) -> None:
        self.prepared.clear()
        self.recent.clear()


kept = Kept()
os.register_at_fork(after_in_child=kept.clear)  # so that a forked process calls `prepare`, which refuses it


def recall(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], implementation: str | None
) -> tuple[Prepared, list[int]] | None:
    """The prepared call and the pointers of a call like one of the last, without modes and transformations around it.

    None where a gradient may be recorded, a pointer is not a multiple of 16, or another GPU is current.
    """
    for recent in kept.recent.get(op.name, ()):
        if (
            recent.attrs == attrs
            and recent.implementation == implementation
            and recent.same(*(given := recent.given(tensors)))
            and recent.absent(tensors) == recent.nothing
            and recent.kinds == [*map(type, attrs)]  # True is not 1
            and (recent.ordinal < 0 or recent.ordinal == _private.current_device())
        ):
            pointers = [tensor.data_ptr() for tensor in given]
            return None if [address for address in pointers if address % 16] else (recent.prepared, pointers)
    return None


def remember(op: Op, tensors: Tensors, attrs: tuple[Any, ...], implementation: str | None, prepared: Prepared) -> None:
    """Let `recall` find a call, if it can: its tensors are plain, without a gradient, and start on 16 bytes."""
    given, absent = (
        [place for place, tensor in enumerate(tensors) if (tensor is None) == missing] for missing in (False, True)
    )
    values = [tensors[place] for place in given]
    if all(type(t) is torch.Tensor and not t.requires_grad and t.data_ptr() % 16 == 0 for t in values):
        same = _private.comparison(values)
        if same is not None:
            recent = Recent(
                picker(given), picker(absent), (None,) * len(absent), attrs, [*map(type, attrs)], implementation, same,
                values[0].get_device(), prepared,
            )  # fmt: skip
            kept.recent.setdefault(op.name, deque(maxlen=Kept.RECENT)).appendleft(recent)


def refuse_fork(op: Op) -> None:
    """Raise in a process that was forked from one that uses CUDA: the driver cannot serve it."""
    if _private.is_in_bad_fork():
        raise UnsupportedError(
            f"{op.name}: process was forked after CUDA was initialised, supported: processes that are spawned"
        )


def prepare(op: Op, tensors: Tensors, attrs: tuple[Any, ...], implementation: str | None) -> Prepared:
    """Check, plan and compile the first call with given shapes."""
    if tensors[0].is_cuda:
        refuse_fork(op)
    plan, results = plan_tensors(op, tensors, attrs, implementation=implementation)
    given = [name for name, tensor in zip(op.tensors, tensors, strict=True) if tensor is not None]
    places = {name: i for i, name in enumerate([*given, *plan.results, *plan.workspace])}
    device = tensors[0].device
    steps, sizes = [], []
    if device.type != "cpu":
        specs = {name: spec_of(t) for name, t in zip(op.tensors, tensors, strict=True) if t is not None}
        for launch in plan.active:
            kernel = compiled(specialize(launch, plan, specs), device_of(device).arch, device.index)
            early = launch.waits and bool(steps)
            start = starter(kernel, launch.grid[0], tuple(value for _, value in launch.constexpr_values), early)
            first = len(places) + len(sizes)
            sizes += launch.size_values
            reads, writes = ([places[name] for name in names] for names in (launch.reads, launch.writes))
            arguments = picker([*reads, *range(first, len(places) + len(sizes)), *writes])
            steps.append(Step(kernel, launch.grid[0], start, arguments))
    made = tuple(Result(spec.shape, row_major(spec.shape), getattr(torch, spec.dtype)) for spec in results)
    offsets = tuple(plan.workspace.values())
    return Prepared(plan, made, plan.workspace_bytes, offsets, tuple(sizes), tuple(steps))


def check_out(op: Op, specs: Sequence[Spec], out: Sequence[torch.Tensor], device: torch.device) -> None:
    """Refuse results whose shape, dtype, density or device is wrong; sizes may be symbolic."""
    for name, spec, tensor in zip(op.outputs, specs, out, strict=True):
        got = spec_of(tensor)
        for what, have, want in (
            ("shape", tuple(got.shape), tuple(spec.shape)),
            ("dtype", got.dtype, spec.dtype),
            ("strides", tuple(tensor.stride()), row_major(spec.shape)),
            ("device", str(tensor.device), str(device)),
        ):
            if have != want and not (what == "strides" and 0 in spec.shape):
                raise ArgumentError(f"{op.name}: out {name} {what} is {have}, expected {want}")


def fits(prepared: Prepared, out: Sequence[torch.Tensor], ordinal: int) -> bool:
    """Whether `check_out` would accept `out`, in a tenth of its time, and its pointers are 16-byte aligned."""
    if prepared.same_out is None or not prepared.same_out(*out):
        for tensor, result in zip(out, prepared.results, strict=True):
            if (
                tensor.shape != result.shape
                or (tensor.stride() != result.strides and 0 not in result.shape)
                or tensor.dtype is not result.dtype
                or tensor.get_device() != ordinal
            ):
                return False
        prepared.same_out = _private.comparison(out)
    return not [tensor for tensor in out if tensor.data_ptr() % 16]


def check_workspace(op: Op, workspace: torch.Tensor, nbytes: int, device: torch.device) -> None:
    if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        got = f"{str(workspace.dtype).removeprefix('torch.')} of shape {tuple(workspace.shape)}"
        raise ArgumentError(f"{op.name}: workspace is {got}, expected uint8 of one dense axis")
    if workspace.device != device:
        raise ArgumentError(f"{op.name}: workspace device is {workspace.device}, expected {device}")
    if workspace.numel() < nbytes:
        raise ArgumentError(f"{op.name}: workspace axis 0 is {workspace.numel()}, expected at least {nbytes} bytes")
    if workspace.data_ptr() % 16:
        raise ArgumentError(f"{op.name}: workspace starts at {workspace.data_ptr():#x}, expected a multiple of 16")


def call(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], out: Sequence[torch.Tensor] = (),
    workspace: torch.Tensor | None = None, implementation: str | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Run `op` on real tensors, on the current stream; its results, allocated unless given as `out`.

    The key holds everything that plans and kernels depend on. It is built inline, since this runs before launches.
    """
    recalled = recall(op, tensors, attrs, implementation)
    if recalled is not None:
        return run(op, tensors, attrs, *recalled, out, workspace)
    pointers: list[int] = []
    key: list[Any] = [op.name, implementation, *attrs, *map(type, attrs)]  # True is not 1
    try:
        ordinal = tensors[0].get_device()  # −1 on the CPU
        for tensor in tensors:
            if tensor is None:
                key.append(None)
            else:
                address = tensor.data_ptr()
                pointers.append(address)
                key.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), address % 16))
        elsewhere = ordinal >= 0 and ordinal != _private.current_device()
    except AttributeError:
        check_tensors(op, tensors)
        raise
    except RuntimeError:
        refuse_fork(op)
        raise
    if elsewhere:
        with torch.cuda.device(ordinal):
            return call(op, tensors, attrs, out, workspace, implementation)
    try:
        prepared = kept.prepared.get(tuple(key))
    except TypeError:  # an attribute that cannot be hashed
        prepared = None
    if prepared is None:
        plain = tuple(op.plain_attributes(dict(zip(op.defaults, attrs, strict=True))).values())
        if [*map(type, plain)] != [*map(type, attrs)]:
            return call(op, tensors, plain, out, workspace, implementation)
        prepared = prepare(op, tensors, attrs, implementation)
        kept.add(tuple(key), prepared)
    remember(op, tensors, attrs, implementation, prepared)
    return run(op, tensors, attrs, prepared, pointers, out, workspace)


def run(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], prepared: Prepared, pointers: list[int],
    out: Sequence[torch.Tensor] = (), workspace: torch.Tensor | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Run a prepared call on tensors whose pointers are given."""
    ordinal = tensors[0].get_device()
    taken = None
    if settings.live:
        taken = _before(op, tensors, attrs)

    if op.mutated or out:  # autograd then refuses a backward that saved their old values
        increment_version([tensors[place] for place in op.mutated] or out)
    allocate = _private.empty_strided_cuda if ordinal >= 0 else _private.empty_strided_cpu
    try:
        if not out:
            out = [allocate(result.shape, result.strides, result.dtype) for result in prepared.results]
        elif not fits(prepared, out, ordinal):
            check_out(op, plan_tensors(op, tensors, attrs)[1], out, tensors[0].device)
            misplaced = next(name for name, t in zip(op.outputs, out, strict=True) if t.data_ptr() % 16)
            raise ArgumentError(f"{op.name}: out {misplaced} does not start on a multiple of 16 bytes")
        if workspace is not None:
            check_workspace(op, workspace, prepared.workspace_bytes, tensors[0].device)
        elif prepared.workspace_bytes:
            workspace = allocate((prepared.workspace_bytes,), (1,), torch.uint8)
    except torch.OutOfMemoryError as error:
        error.add_note(f"{op.name}: results {prepared.results} and {prepared.workspace_bytes} bytes of workspace")
        raise

    if ordinal < 0:
        _interpret(op, prepared.plan, tensors, out, workspace)
    else:
        _launch(prepared, pointers, out, workspace, ordinal)
    if taken is not None:
        shadow.compare(taken, _by_name(op, tensors), out, take)
    return out


def _by_name(op: Op, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in zip(op.tensors, tensors, strict=True) if tensor is not None}


def _before(op: Op, tensors: Tensors, attrs: tuple[Any, ...]) -> shadow.Sample | None:
    """XMLA_CHECK's validation of a call, and XMLA_SHADOW's sample of it; neither works while a graph is captured."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    given, values = _by_name(op, tensors), dict(zip(op.defaults, attrs, strict=True))
    if settings.check:
        check_values(op, {name: to_numpy(tensor.cpu()) for name, tensor in given.items()}, values)
    if not settings.shadow:
        return None
    return shadow.sample(op, given, {name: spec_of(tensor) for name, tensor in given.items()}, values, take)


def _launch(
    prepared: Prepared, pointers: list[int], out: Sequence[torch.Tensor], workspace: torch.Tensor | None, ordinal: int
) -> None:
    base = 0 if workspace is None else workspace.data_ptr()
    values = [*pointers, *[t.data_ptr() for t in out], *[base + offset for offset in prepared.offsets], *prepared.sizes]
    stream = driver.active.get_current_stream(ordinal)  # pyrefly: ignore
    enter, leave = profiler_hooks()
    for step in prepared.steps:
        arguments = step.arguments(values)
        metadata = None
        if enter is not None:
            metadata = step.kernel.launch_metadata((step.programs, 1, 1), stream, *arguments)
        step.start(stream, metadata, enter, leave, arguments)


def _interpret(
    op: Op, plan: Plan, tensors: Tensors, out: Sequence[torch.Tensor], workspace: torch.Tensor | None
) -> None:
    from xmla.core import interpreter

    interpreter.require(op.name, plan)
    arrays = {name: to_numpy(t) for name, t in zip(op.tensors, tensors, strict=True) if t is not None}
    arrays |= {name: to_numpy(tensor) for name, tensor in zip(op.outputs, out, strict=True)}
    if workspace is not None:
        space = workspace.numpy()
        for name, offset in plan.workspace.items():
            spec = plan.buffers[name]
            arrays[name] = space[offset : offset + spec.nbytes].view(DTYPES[spec.dtype][0]).reshape(spec.shape)
    interpreter.run(plan, arrays)
