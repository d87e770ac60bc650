"""Calls of ops as specs, and whether an engine's plugin lists the kernels that they launch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from xmla import torch_api as xt
from xmla.core.models.calls import Call, specializations
from xmla.core.registry import registry
from xmla.core.values import KNOWN_DEVICES, Device
from xmla.torch_api._arrays import spec_of


def call_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """A call of the op by PyTorch."""
    op = registry()[name]
    tensors = dict(zip(op.tensors, args, strict=False)) | {key: kwargs[key] for key in op.tensors if key in kwargs}
    specs = {argument: spec_of(tensor) for argument, tensor in tensors.items() if tensor is not None}
    return Call(name, specs, {key: value for key, value in kwargs.items() if key in op.defaults})


def record(patch: pytest.MonkeyPatch, ops: Iterable[str]) -> list[Call]:
    """The calls of these ops by PyTorch from now on."""
    made: list[Call] = []

    def noted(name: str) -> Callable[..., Any]:
        op = getattr(xt, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(call_of(name, args, kwargs))
            return op(*args, **kwargs)

        return call

    for name in ops:
        patch.setattr(xt, name, noted(name))
    return made


def unlisted(
    made: Iterable[Call], calls: Callable[[Device], Iterable[Call]], devices: Iterable[Device] = KNOWN_DEVICES
) -> list[str]:
    """Kernels that these calls launch on one of these GPUs and that `calls`, which warm-up compiles, do not."""
    found: list[str] = []
    for device in devices:
        listed = {*specializations(calls(device), device)}
        wanted = {kernel: call for call in made for kernel in call.specializations(device)}
        found += [f"{device.name}, {call}: {kernel}" for kernel, call in wanted.items() if kernel not in listed]
    return found
