"""`jit` over several devices: if tokens or heads are sharded, each device computes its own, without an exchange.

Of results that are sums over them, the gradients of a derivative, each device computes a part, and these are added.
All other axes are replicated. So are all axes of an op that writes a cache, since every copy of the cache needs every
token. Tokens without request_ids get them, because on one device a token's request follows from its number.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xmla.core.call import Problem, Result, tokens_a_request
from xmla.core.op import Op
from xmla.core.values import Spec
from xmla.jax_api._private import ManualContext, ShardingContext
from xmla.jax_api._run import HostFunction

Axes = Sequence[str | None]  # of an array; None for an axis of a result that is not sharded


def shared_axes(op: Op, operands: Sequence[str]) -> list[str]:
    """The axes that can be sharded in a call with these operands: those of a result, if parts of others add up."""
    names = {axis for name in operands for axis in op.tensors[name].names}
    results = op.outputs.values()

    def divides(axis: str) -> bool:
        parts = all(axis in (*result.names, *result.sum_over.split()) for result in results)
        return any(axis in result.names for result in results) and (parts or not op.sums_over_tokens)

    return [axis for axis in ("T", "H") if axis in names and divides(axis) and not op.mutates]


def _result_axes(op: Op, problem: Problem) -> list[Axes]:
    """The axes of each result that can be sharded; None for others, and for those of a result that is empty."""
    shared = shared_axes(op, list(problem.specs))

    def axes_of(result: Result, spec: Spec) -> Axes:
        sizes = zip(result.names, spec.shape, strict=True)
        return [axis if axis in shared and size == problem[axis] else None for axis, size in sizes]

    return list(map(axes_of, op.outputs.values(), problem.results.values()))


def _mesh_axes(op: Op, problem: Problem, specs: Sequence[P]) -> dict[str, Any]:
    """The mesh axes over which the operands' `specs` shard each axis; a mesh axis serves one axis."""
    shared = shared_axes(op, list(problem.specs))
    mesh_axes: dict[str, Any] = {}
    taken: set[str] = set()
    for name, spec in zip(problem.specs, specs, strict=True):
        for axis, entry in zip(op.tensors[name].names, spec, strict=False):  # a spec may be shorter
            over = {entry} if isinstance(entry, str) else set(entry or ())
            if axis in shared and axis not in mesh_axes and over and not over & taken:
                mesh_axes[axis] = entry
                taken |= over
    return mesh_axes


def _partition_spec(axes: Axes, mesh_axes: Mapping[str, Any]) -> P:
    return P(*(mesh_axes.get(axis) if axis else None for axis in axes))


def result_specs(op: Op, problem: Problem, specs: Sequence[P]) -> list[P]:
    """How the results are sharded if the operands have `specs`."""
    mesh_axes = _mesh_axes(op, problem, specs)
    return [_partition_spec(axes, mesh_axes) for axes in _result_axes(op, problem)]


def over_devices(module: mlir.ModuleContext) -> bool:
    """Whether `jit` lowers `module` over several devices: outside a `shard_map`, or in one over some axes of a mesh."""
    where = module.axis_context
    if isinstance(where, ManualContext):
        return len(where.manual_axes) < len(where.mesh.axis_names)
    return isinstance(where, ShardingContext) and where.num_devices > 1


def over_a_mesh(module: mlir.ModuleContext) -> bool:
    """Whether these are of a known mesh; an export cannot name its partitioning."""
    where = module.axis_context
    return (
        over_devices(module)
        and isinstance(where, ShardingContext)
        and where.abstract_mesh is not None
        and not module.lowering_parameters.for_export
        and jax.config.jax_use_shardy_partitioner
    )


def callback_of(module: mlir.ModuleContext, function: HostFunction) -> Callable[..., Any]:
    """`jax.pure_callback` of `function` by every device of a `module` over several.

    A part that XLA partitions is lowered as a separate module, whose callbacks are lost: XLA takes their numbers for
    those of `module`. Therefore the function is registered in `module` and called by its number.
    """
    number = np.uint64(len(module.host_callbacks))
    module.add_host_callback(function)

    def callback(types: Sequence[jax.ShapeDtypeStruct], *operands: Any) -> Any:
        return jax.ffi.ffi_call("xla_ffi_python_cpu_callback", types)(*operands, index=number)

    return callback


def _summed_over(result: Result, mesh_axes: Mapping[str, Any]) -> tuple[str, ...]:
    """The mesh axes along which devices have parts of a sum."""
    entries = (mesh_axes.get(axis, ()) for axis in result.sum_over.split())
    return tuple(name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry))


def _add_parts(part: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """The sum of the devices' parts, in float32: rounded once more than those are."""
    return jax.lax.psum(part.astype(jnp.float32), over).astype(part.dtype) if over and part.size else part


def partitioned(
    op: Op, function_of: Callable[[tuple[str, ...]], Callable[..., Any]], problem: Problem
) -> Callable[..., Any]:
    """The call of `problem`, a function of its operands, on each device's own part along the sharded axes.

    `function_of` takes the operands' names. Where tokens are sharded whose requests follow from their numbers, each
    device gets the request ids of its own.
    """
    shared = shared_axes(op, list(problem.specs))
    names = tuple(problem.specs)
    numbered = "T" in shared and "request_ids" in op.tensors and "request_ids" not in names
    function = function_of((*names, "request_ids") if numbered else names)
    replicated = function_of(names) if numbered else function
    operands: list[Axes] = [op.tensors[name].names for name in names]
    operands += [["T"]] * numbered
    results = _result_axes(op, problem)
    whole: list[str] = []

    def factor(axis: str | None) -> str:
        if axis in shared:
            return axis
        whole.append(f"whole{len(whole)}")
        return whole[-1]

    def rule(arrays: Sequence[Axes]) -> str:
        return ", ".join(" ".join(map(factor, axes)) for axes in arrays)

    def partition(mesh: Mesh, arguments: Sequence[Any], _: Any) -> tuple[Any, ...]:
        mesh_axes = _mesh_axes(op, problem, [argument.sharding.spec for argument in arguments[: len(names)]])

        def place(arrays: Sequence[Axes]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, _partition_spec(axes, mesh_axes)) for axes in arrays)

        def local(*arrays: Any) -> tuple[Any, ...]:
            # They have no mesh: XLA would take an operation on parts for one that it has yet to partition.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                parts = function(*arrays) if "T" in mesh_axes else replicated(*arrays[: len(names)])
                return tuple(map(_add_parts, parts, over))

        over = [_summed_over(result, mesh_axes) for result in op.outputs.values()]
        return mesh, local, place(results), place(operands)

    divided = custom_partitioning(function)
    sharding_rule = f"{rule(operands)} -> {rule(results)}"
    divided.def_partition(partition, sharding_rule=sharding_rule, need_replication_factors=tuple(whole))

    def call(*arrays: Any) -> Any:
        if not numbered:
            return divided(*arrays)
        return divided(*arrays, jnp.arange(problem["T"], dtype=jnp.int32) // tokens_a_request(problem))

    return call
