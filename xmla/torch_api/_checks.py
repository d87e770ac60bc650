"""Checks of torch tensors that come before a launch, in the words of errors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.op import Op
from xmla.core.values import Spec, row_major
from xmla.torch_api import _private
from xmla.torch_api._arrays import spec_of

# An op's tensor arguments in order; optional arguments may be None, the first never is.
Tensors = Sequence[Any]


def check_tensors(op: Op, tensors: Tensors) -> None:
    for name, value in zip(op.tensors, tensors, strict=True):
        if not (value is None and name in op.optional):
            check_tensor(op, name, value)


def check_tensor(op: Op, name: str, value: Any, written: bool = False) -> None:
    """Refuse what has no strides or is spread over ranks, and to write a tensor that is the negative of its memory."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{op.name}: {name} is {type(value).__name__}, expected torch.Tensor")
    if isinstance(value, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        raise ArgumentError(f"{op.name}: {name} is {type(value).__name__}, expected a tensor that has a shape")
    if type(value) is not torch.Tensor and hasattr(value, "to_local"):
        raise ArgumentError(f"{op.name}: {name} is {type(value).__name__}, expected this rank's part (to_local())")
    if value.is_nested or value.layout is not torch.strided:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ArgumentError(f"{op.name}: {name} layout is {layout}, expected strided")
    if written and value.is_neg():
        raise ArgumentError(f"{op.name}: {name} is a negated view, expected memory that holds its values")


def check_memory(op: Op, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse zero tensors, storages that were freed, and what a transformation that has ended has passed."""
    for name, tensor in tensors.items():
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            address = 0
        if not address and tensor.numel():
            raise ArgumentError(f"{op.name}: {name} has no memory, expected memory (clone() of a zero tensor has it)")


def check_devices(op: Op, tensors: Tensors) -> None:
    for name, tensor in zip(op.tensors, tensors, strict=True):
        if tensor is not None and tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"{op.name}: {name} device is {tensor.device}, supported: cpu and cuda")


def check_fork(op: Op) -> None:
    """Check that the process was not forked from one that uses CUDA: the driver could not serve it."""
    if _private.is_in_bad_fork():
        raise UnsupportedError(
            f"{op.name}: process was forked after CUDA was initialised, supported: processes that are spawned"
        )


def check_out(op: Op, specs: Sequence[Spec], out: Sequence[torch.Tensor], device: torch.device) -> None:
    """Refuse results whose shape, dtype, density or device is wrong; sizes may be symbolic."""
    for name, spec, tensor in zip(op.outputs, specs, out, strict=True):
        check_tensor(op, f"out {name}", tensor, written=True)
        got = spec_of(tensor)
        for what, have, want in (
            ("shape", tuple(got.shape), tuple(spec.shape)),
            ("dtype", got.dtype, spec.dtype),
            ("strides", tuple(tensor.stride()), row_major(spec.shape)),
            ("device", str(tensor.device), str(device)),
        ):
            if have != want and not (what == "strides" and 0 in spec.shape):
                raise ArgumentError(f"{op.name}: out {name} {what} is {have}, expected {want}")


def check_placed(op: Op, out: Sequence[torch.Tensor]) -> None:
    for name, tensor in zip(op.outputs, out, strict=True):
        if spec_of(tensor).alignment < 16:
            raise ArgumentError(f"{op.name}: out {name} does not start on a multiple of 16 bytes")


def check_workspace(op: Op, workspace: torch.Tensor, nbytes: int, device: torch.device) -> None:
    check_tensor(op, "workspace", workspace, written=True)
    if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        got = f"{str(workspace.dtype).removeprefix('torch.')} of shape {tuple(workspace.shape)}"
        raise ArgumentError(f"{op.name}: workspace is {got}, expected uint8 of one dense axis")
    if workspace.device != device:
        raise ArgumentError(f"{op.name}: workspace device is {workspace.device}, expected {device}")
    if workspace.numel() < nbytes:
        raise ArgumentError(f"{op.name}: workspace axis 0 is {workspace.numel()}, expected at least {nbytes} bytes")
    if spec_of(workspace).alignment < 16:
        raise ArgumentError(f"{op.name}: workspace starts at {workspace.data_ptr():#x}, expected a multiple of 16")


def by_name(op: Op, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in zip(op.tensors, tensors, strict=True) if tensor is not None}


def written_names(op: Op, out: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results that a call is given, by the names that messages have for them."""
    return {f"out {name}": tensor for name, tensor in zip(op.outputs, out, strict=False)}
