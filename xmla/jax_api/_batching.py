"""vmap: a batch of calls as one call with more rows, without a loop.

The batch is folded into the axes T (tokens) and B (requests) of every argument. A pool (a cache, or the keys of a
prefill) with a batch axis becomes one larger pool, and the indices into it are shifted to each element's own part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xmla.core.call import Tensor
from xmla.core.errors import UnsupportedError
from xmla.core.op import Op

ROWS = ("T", "B")


def row_axis(tensor: Tensor) -> str | None:
    return next((name for name in tensor.names if name in ROWS), None)


def move(array: Any, source: Any, place: Any) -> jax.Array:
    """`array` with its axis `source` moved to `place`; neither is None, although the types of batch axes allow it."""
    return jnp.moveaxis(array, source, place)


def batched_pools(op: Op, dims: Mapping[str, int | None]) -> set[str]:
    """The leading axes, such as P, of the pools that have a batch axis; refuses arguments that cannot be folded.

    Raises:
        UnsupportedError: The op has no rows, an argument that is the same for all rows has a batch axis, or of several
            arguments over one pool axis some have a batch axis and some do not.
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
            raise UnsupportedError(f"{op.name}: {name} has no batch axis under vmap, supported: one, as {other}")
    return batched


@dataclass(frozen=True, slots=True)
class Division:
    """How explicit axes of a mesh, of the names `over`, divide the tokens of each call of a batch into `parts`.

    Those of an op that writes a cache are not divided: every device makes its calls whole.
    """

    over: tuple[str, ...] = ()
    parts: int = 1

    @classmethod
    def of(cls, op: Op, arrays: Mapping[str, Any], dims: Mapping[str, int | None]) -> "Division":
        for name in () if op.mutates else arrays:
            if "T" not in op.tensors[name].names:
                continue
            axes: list[str | None] = [*op.tensors[name].names]
            if (batch := dims[name]) is not None:
                axes.insert(batch, None)
            sharding = jax.typeof(arrays[name]).sharding
            if over := _names(sharding.spec[axes.index("T")]):
                return cls(over, prod(sharding.mesh.shape[axis] for axis in over))
        return cls()


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def fold(
    op: Op, arrays: Mapping[str, Any], dims: Mapping[str, int | None], size: int, division: Division
) -> dict[str, Any]:
    """The arguments of `size` calls as those of one call; `dims` has each argument's batch axis, or None.

    Tokens that a mesh divides stay where they are: those of the one call are the first part of each element, then the
    second, and so on. So a token's request, if it follows from the token's number, has to be named.
    """
    pools = batched_pools(op, dims)
    axes: dict[str, int] = {}
    for name, array in arrays.items():
        shape = [n for axis, n in enumerate(array.shape) if axis != dims[name]]
        axes |= zip(op.tensors[name].names, shape, strict=True)
    if division.parts > 1 and "request_ids" in op.tensors and "request_ids" not in arrays:
        ids = jnp.arange(axes["T"], dtype=jnp.int32) // max(axes["T"] // max(axes["B"], 1), 1)
        arrays, dims = {**arrays, "request_ids": ids}, {**dims, "request_ids": None}
    folded = {}
    for name in (name for name in op.tensors if name in arrays):
        array, tensor = arrays[name], op.tensors[name]
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
        folded[name] = _merge(array, place, division if row == "T" else Division())
    return folded


def _merge(array: jax.Array, place: int, division: Division) -> jax.Array:
    """The batch, which is axis `place`, and the rows beside it as one axis; rows are divided so, or replicated."""
    before, (size, rows), after = array.shape[:place], array.shape[place : place + 2], array.shape[place + 2 :]
    spec = jax.typeof(array).sharding.spec
    first, (batch, over), last = spec[:place], spec[place : place + 2], spec[place + 2 :]
    if over and _names(over) != division.over:
        array, over = _reshard(array, P(*first, batch, None, *last)), None
    if division.parts > 1:
        each = rows // division.parts
        shape = (*before, size, division.parts, each, *after)
        array = move(_reshape(array, shape, P(*first, batch, over, None, *last)), place + 1, place)
    merged = (*_names(over), *_names(batch)) or None
    return _reshape(array, (*before, size * rows, *after), P(*first, merged, *last))


def replicate(array: jax.Array, *axes: int) -> jax.Array:
    """The array with these of its axes on every device whole, where explicit axes of a mesh shard them."""
    spec = [None if axis in axes else entry for axis, entry in enumerate(jax.typeof(array).sharding.spec)]
    return array if P(*spec) == jax.typeof(array).sharding.spec else _reshard(array, P(*spec))


def _reshard(array: jax.Array, spec: P) -> jax.Array:
    return jax.sharding.reshard(array, NamedSharding(jax.typeof(array).sharding.mesh, spec))


def _reshape(array: jax.Array, shape: tuple[int, ...], spec: P) -> jax.Array:
    """The array in another shape, so sharded; JAX itself does not know how where explicit axes of a mesh shard it."""
    mesh = jax.typeof(array).sharding.mesh
    return jax.lax.reshape(array, shape, out_sharding=NamedSharding(mesh, spec) if any(spec) else None)


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


def unfold(array: jax.Array, size: int, division: Division) -> jax.Array:
    """A result of the folded call with the batch as its first axis."""
    rows, after = array.shape[0] // size, array.shape[1:]
    sharded, *last = jax.typeof(array).sharding.spec
    over = tuple(name for name in _names(sharded) if name in division.over) or None
    batch = tuple(name for name in _names(sharded) if name not in division.over) or None
    if division.parts > 1:
        shape = (division.parts, size, rows // division.parts, *after)
        array = move(_reshape(array, shape, P(over, batch, None, *last)), 0, 1)
    return _reshape(array, (size, rows, *after), P(batch, over, *last))
