"""torch.vmap: a call for each element of the batch, in order; of a batch of none, results without elements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from xmla.core.errors import UnsupportedError
from xmla.core.op import Op
from xmla.core.values import Attributes
from xmla.torch_api._arrays import spec_of

Tensors = Sequence[torch.Tensor | None]
Dims = Sequence[int | None]  # the batch axis of each tensor, None of one that all calls share


def call_each(
    op: Op, call: Callable[..., Any], size: int, tensors: Tensors, dims: Dims, named: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The results of `call` for each of `size` elements, the batch as their first axis."""
    _check_updated(op, tensors, dims)
    batch = list(zip(tensors, dims, strict=True))
    results = []
    for element in range(size):
        returned = call(*(t if t is None or dim is None else t.select(dim, element) for t, dim in batch), **named)
        results.append(returned if isinstance(returned, tuple) else (returned,))
    return [torch.stack(values) for values in zip(*results, strict=True)] if op.outputs else []


def results_of_none(
    op: Op, tensors: Tensors, dims: Dims, attrs: Attributes, implementation: str | None
) -> list[torch.Tensor]:
    """The results of no calls; those that have a derivative depend on the arguments that are differentiated."""
    _check_updated(op, tensors, dims)
    specs = {}
    for name, tensor, dim in zip(op.tensors, tensors, dims, strict=False):
        if tensor is not None:
            spec = specs[name] = spec_of(tensor)
            if dim is not None:  # no call reads any memory, so that it lies as is right
                specs[name] = replace(spec, shape=(*spec.shape[:dim], *spec.shape[dim + 1 :]), strides=None)
    like = next(tensor for tensor in tensors if tensor is not None)
    moving = [tensor.sum() * 0 for tensor in tensors if tensor is not None and tensor.requires_grad]
    results = []
    for name, spec in op.bind(specs, attrs, implementation).results.items():
        result = like.new_empty((0, *spec.shape), dtype=getattr(torch, spec.dtype))
        results.append(sum(moving, result) if name in op.differentiable else result)
    return results


def _check_updated(op: Op, tensors: Tensors, dims: Dims) -> None:
    """Refuse to update in one call what another one updates: their order would matter."""
    for name, tensor, dim in zip(op.tensors, tensors, dims, strict=False):
        if tensor is None or name not in op.mutates:
            continue
        if dim is None:
            raise UnsupportedError(f"{op.name}: {name} is updated without a batch axis under vmap, supported: with one")
        if not _is_apart(tensor):
            raise UnsupportedError(f"{op.name}: {name} has elements that share memory under vmap, supported: none")


def _is_apart(tensor: torch.Tensor) -> bool:
    """Whether strides tell that no two elements share memory, as of slices of dense tensors."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * size
    return True
