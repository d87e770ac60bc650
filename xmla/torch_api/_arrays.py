"""Conversions between torch tensors and the core's specs and NumPy arrays."""

from functools import lru_cache

import numpy as np
import torch

from xmla.core.values import DTYPES, INTERPRETER, Device, Spec, alignment_of
from xmla.torch_api._private import FakeTensor

NAMES = {getattr(torch, name): name for name in DTYPES}


def spec_of(tensor: torch.Tensor) -> Spec:
    name = NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    address, traced = 0, isinstance(tensor, FakeTensor)
    if not traced:
        try:
            address = tensor.data_ptr()  # a meta tensor's is 0
        except RuntimeError:  # a wrapper that a transformation or a trace passes has none
            traced = True
    strides = tensor.stride() if traced else strides_of(tensor)  # of symbols it is not asked whether they are dense
    return Spec(tuple(tensor.shape), name, strides, alignment_of(address))


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor, None if it is dense."""
    return None if tensor.is_contiguous() else tensor.stride()


@lru_cache
def device_of(device: torch.device) -> Device:
    if device.type == "cpu":
        return INTERPRETER
    facts = torch.cuda.get_device_properties(device)
    return Device.of(facts.name, facts.major * 10 + facts.minor, facts.multi_processor_count)


class _Memory:
    """A tensor's memory as integers of its elements' size, in the form that NumPy takes.

    `Tensor.numpy` would make its storage one that nobody may resize, which FSDP does to a layer's parameters.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.tensor = tensor  # alive as long as a view of it
        self.__array_interface__ = {
            "version": 3, "typestr": f"=u{size}", "data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
        }  # fmt: skip


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view of a CPU tensor with its NumPy dtype."""
    dtype = DTYPES[NAMES[tensor.dtype]][0]
    if not tensor.numel():  # it may have no address, which NumPy 2.1 asks for
        return np.empty(tuple(tensor.shape), dtype)
    return np.asarray(_Memory(tensor)).view(dtype)


def from_strided(array: np.ndarray, device: str) -> torch.Tensor:
    """A copy with the array's dtype and strides, on `device`."""
    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device=device)
    strides = [step // array.itemsize for step in array.strides]
    span = 1 + sum((n - 1) * step for n, step in zip(array.shape, strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (span,), (array.itemsize,)).view(f"u{array.itemsize}").copy()
    return torch.from_numpy(flat).to(device).view(dtype).as_strided(array.shape, strides)


def from_numpy(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """A copy of `array` rounded to the dtype of `like`, on its device."""
    dtype = DTYPES[NAMES[like.dtype]][0]
    raw = torch.from_numpy(np.array(array.astype(dtype, copy=False), order="C").view(f"u{dtype.itemsize}"))
    return raw.view(like.dtype).to(like.device)


def take(tensor: torch.Tensor, places: np.ndarray | None) -> np.ndarray:
    """A copy on the host of the elements of the first axis at `places`, or of all."""
    if places is None:
        return to_numpy(tensor.cpu()).copy()
    index = torch.from_numpy(places.astype(np.int64)).to(tensor.device)
    one_byte = tensor.dtype.itemsize == 1  # not every one-byte dtype can be indexed
    chosen = (tensor.view(torch.uint8) if one_byte else tensor)[index]
    return to_numpy(chosen.view(tensor.dtype).cpu() if one_byte else chosen.cpu())
