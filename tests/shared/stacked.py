"""Forms in which a jitted function calls an op on parts of stacks, as models hold the weights and caches of layers.

A form is a function of the call, the arrays that it reads and those that it updates, all with a leading axis of layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xmla.core.op import Op
from xmla.jax_api._all_ops import JAX_OPS

LAYERS = 3
FUSED = 256  # bytes: XLA fuses slices of multiples of it

Arrays = dict[str, Any]
Call = Callable[[Arrays, Arrays], tuple[list[Any], Arrays]]  # read and updated arguments → results, new values


def calling(op: Op, attrs: Mapping[str, Any]) -> Call:
    def call(read: Arrays, updated: Arrays) -> tuple[list[Any], Arrays]:
        arrays = read | updated
        returned = jax.tree.leaves(getattr(JAX_OPS, op.name)(*map(arrays.get, op.tensors), **attrs))
        return returned[: len(op.outputs)], dict(zip(op.mutates, returned[len(op.outputs) :], strict=True))

    return call


def part(stacks: Arrays, layer: Any) -> Arrays:
    return {name: stack[layer] for name, stack in stacks.items()}


def slices(call: Call, read: Arrays, updated: Arrays) -> Any:
    return [call(part(read, layer), part(updated, layer)) for layer in range(LAYERS)]


def restacked(call: Call, read: Arrays, updated: Arrays) -> Any:
    return jax.tree.map(lambda *layers: jnp.stack(layers), *slices(call, read, updated))


def written_back(call: Call, read: Arrays, updated: Arrays) -> Any:
    results = []
    for layer in range(LAYERS):
        result, new = call(part(read, layer), part(updated, layer))
        results.append(result)
        updated = {name: updated[name].at[layer].set(value) for name, value in new.items()}
    return [(result, part(updated, layer)) for layer, result in enumerate(results)]


def scanned(call: Call, read: Arrays, updated: Arrays) -> Any:
    def body(_: int, layer: tuple[Arrays, Arrays]) -> tuple[int, Any]:
        return 0, call(*layer)

    return jax.lax.scan(body, 0, (read, updated))[1]


def scanned_and_used(call: Call, read: Arrays, updated: Arrays) -> Any:
    """A layer's results are stacked, and the next layer depends on them."""

    def body(sums: jax.Array, layer: tuple[Arrays, Arrays]) -> tuple[jax.Array, Any]:
        outputs = call(*layer)
        return sums + sum(leaf.reshape(-1)[:8].astype(jnp.float32).sum() for leaf in jax.tree.leaves(outputs)), outputs

    return jax.lax.scan(body, jnp.float32(0), (read, updated))


def _over_its_mesh(stack: jax.Array, part: NamedSharding | None) -> jax.Array:
    """A stack whose layers are sharded as a part is whose axes are explicit: no store of the part would decide it."""
    if part is None or not any(part.spec):
        return stack
    return jax.sharding.reshard(stack, NamedSharding(part.mesh, PartitionSpec(None, *part.spec)))


def looped(call: Call, read: Arrays, updated: Arrays) -> Any:
    """A loop over layers by a dynamic index, which writes each part back."""
    shapes = jax.eval_shape(call, part(read, 0), part(updated, 0))[0]
    empty = [_over_its_mesh(jnp.stack([jnp.zeros_like(shape)] * LAYERS), shape.sharding) for shape in shapes]

    def body(layer: Any, carry: Any) -> Any:
        stacks, updated = carry
        results, new = call(part(read, layer), part(updated, layer))
        stacks = [stack.at[layer].set(result) for stack, result in zip(stacks, results, strict=True)]
        return stacks, {name: updated[name].at[layer].set(value) for name, value in new.items()}

    return jax.lax.fori_loop(0, LAYERS, body, (empty, updated))


def prefixes(call: Call, read: Arrays, updated: Arrays) -> Any:
    """Slices of larger arrays: each layer's stands at the start of one."""
    wide = {name: jnp.concatenate([stack, stack], 1) for name, stack in updated.items()}
    wide = jax.lax.optimization_barrier(wide)
    return slices(call, read, {name: wide[name][:, : updated[name].shape[1]] for name in wide})


def by_refs(call: Call, read: Arrays, updated: Arrays) -> Any:
    refs = {name: jax.new_ref(stack) for name, stack in updated.items()}
    results = []
    for layer in range(LAYERS):
        result, new = call(part(read, layer), part(refs, layer))
        results.append(result)
        for name, value in new.items():
            refs[name][layer] = value
    return [(result, part(refs, layer)) for layer, result in enumerate(results)]


def over_devices(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """A form on each device's own layers; what it returns layer by layer gets an axis of devices."""

    def of_a_device(read: Arrays, updated: Arrays) -> Any:
        found = function(read, updated)
        return jax.tree.map(lambda leaf: leaf[None], found) if isinstance(found, list) else found

    return jax.shard_map(of_a_device, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))


def beside_the_old(call: Call, read: Arrays, updated: Arrays) -> Any:
    """The parts as they were are results, too."""
    return slices(call, read, updated), updated
