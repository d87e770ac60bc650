"""vmap: a batch of calls as one call with more rows, without a loop.

The batch is folded into the axes T (tokens) and B (requests) of every argument. A pool (a cache, or the keys of a
prefill) with a batch axis becomes one larger pool, and the indices into it are shifted to each element's own part.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.op import Op
from xmla.core.problem import Tensor

ROWS = ("T", "B")


def row_axis(tensor: Tensor) -> str | None:
    return next((name for name in tensor.names if name in ROWS), None)


def move(array: Any, source: Any, place: Any) -> jax.Array:
    """`array` with its axis `source` moved to `place`; neither is None, although the types of batch axes allow it."""
    return jnp.moveaxis(array, source, place)


def batched_pools(op: Op, dims: Mapping[str, int | None]) -> set[str]:
    """The leading axes, such as P, of the pools that have a batch axis; refuses arguments that cannot be folded.

    Raises:
        UnsupportedError: The op has no rows, or an argument that is the same for all rows has a batch axis.
        ArgumentError: Of several arguments over one pool axis, some have a batch axis and some do not.
    """
    if not any("T" in tensor.names for tensor in op.tensors.values()):
        raise UnsupportedError(f"{op.name}: vmap is given, supported: ops with an axis T")
    indexed = {(t.index_of or t.bound_of).split()[0] for t in op.tensors.values() if t.index_of or t.bound_of}
    pools = {name: t.names[0] for name, t in op.tensors.items() if name in dims and row_axis(t) is None}
    batched = {axis for name, axis in pools.items() if dims[name] is not None}
    for name, axis in pools.items():
        if dims[name] is not None and axis not in indexed:
            raise UnsupportedError(
                f"{op.name}: {name} has a batch axis under vmap, supported: the same {name} for all of a batch"
            )
        if dims[name] is None and axis in batched:
            other = next(n for n, a in pools.items() if a == axis and dims[n] is not None)
            raise ArgumentError(f"{op.name}: {name} has no batch axis under vmap, expected one, as {other}")
    return batched


def fold(op: Op, arrays: Mapping[str, Any], dims: Mapping[str, int | None], size: int) -> dict[str, Any]:
    """The arguments of `size` calls as those of one call; `dims` has each argument's batch axis, or None."""
    pools = batched_pools(op, dims)
    axes: dict[str, int] = {}
    for name, array in arrays.items():
        shape = [n for axis, n in enumerate(array.shape) if axis != dims[name]]
        axes |= zip(op.tensors[name].names, shape, strict=True)
    folded = {}
    for name, array in arrays.items():
        tensor = op.tensors[name]
        row = row_axis(tensor)
        if row is None and dims[name] is None:
            folded[name] = array
            continue
        place = 0 if row is None else tensor.names.index(row)
        if dims[name] is None:
            shape = (*array.shape[:place], size, *array.shape[place:])
            array = jnp.broadcast_to(jnp.expand_dims(array, place), shape)
        else:
            array = move(array, dims[name], place)
        counted = (tensor.index_of or tensor.bound_of).split()
        if pools.union(ROWS).intersection(counted[:1]):
            array = _shift(op, name, array, place, prod(axes[axis] for axis in counted))
        shape = array.shape
        folded[name] = array.reshape(*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])
    return folded


def _shift(op: Op, name: str, array: jax.Array, place: int, total: int) -> jax.Array:
    """Shift indices or bounds in [0, total) of each batch element to the element's part; axis `place` is the batch."""
    size = array.shape[place]
    if size * total > jnp.iinfo(array.dtype).max:
        raise UnsupportedError(
            f"{op.name}: {name} counts {size} × {total} places under vmap, supported: what {array.dtype} holds"
        )
    first = jnp.arange(size, dtype=array.dtype).reshape(size, *[1] * (array.ndim - place - 1)) * total
    if op.tensors[name].bound_of:
        return jnp.clip(array, 0, total) + first
    return jnp.where((array >= 0) & (array < total), array + first, -1)


def unfold(array: jax.Array, size: int) -> jax.Array:
    """A result of the folded call with the batch as its first axis."""
    return array.reshape(size, array.shape[0] // size, *array.shape[1:])
