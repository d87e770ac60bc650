"""The forms in which programs call an op, beside those of tests/shared/stacked.py, and what XLA may make of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import stacked
from op_call import OpCall
from stacked import LAYERS, Arrays, Call, part

from xmla.jax_api._launcher import TARGET

BATCH = 2
STEPS = 2
DOUBLE_BUFFERED = {"xla_gpu_enable_while_loop_double_buffering": True}


def twice(call: Call, read: Arrays, cache: Arrays) -> Any:
    first, cache = call(part(read, 0), cache)
    return first, call(part(read, 1), cache)


def twice_from_one(call: Call, read: Arrays, cache: Arrays) -> Any:
    """Two calls update the cache as it was, which is a result, too."""
    return call(part(read, 0), cache), call(part(read, 1), cache), cache


def caches_of_their_own(call: Call, read: Arrays, caches: list[Arrays]) -> Any:
    return [call(part(read, layer), cache) for layer, cache in enumerate(caches)]


def cache_in_a_carry(call: Call, read: Arrays, cache: Arrays) -> Any:
    return jax.lax.scan(lambda cache, layer: call(layer, cache)[::-1], cache, read)


def until_it_ends(call: Call, read: Arrays, cache: Arrays) -> Any:
    """Steps until a value says so: a loop of unknown length."""

    def body(state: Any) -> Any:
        step, _, cache = state
        results, cache = call(read, cache)
        return step + 1, jax.tree.leaves((results, cache))[0].reshape(-1)[0] == 0, cache

    return jax.lax.while_loop(lambda state: (state[0] < LAYERS) & ~state[1], body, (0, False, cache))


def layers_in_steps(call: Call, read: Arrays, updated: Arrays) -> Any:
    """A scan over layers inside of one over steps, whose carry has the stacks."""

    def step(updated: Arrays, _: None) -> Any:
        results, new = jax.lax.scan(lambda _, layer: (0, call(*layer)), 0, (read, updated))[1]
        return new, results

    return jax.lax.scan(step, updated, None, STEPS)


def second_of_two(call: Call, read: Arrays, updated: Arrays) -> Any:
    """A loop over layers of two caches each: one index is the loop's, the other a constant."""

    def second(stacks: Arrays, layer: Any) -> Arrays:
        return {name: stack[layer, 1] for name, stack in stacks.items()}

    def body(layer: Any, updated: Arrays) -> Arrays:
        _, new = call(second(read, layer), second(updated, layer))
        return {name: updated[name].at[layer, 1].set(value) for name, value in new.items()}

    return jax.lax.fori_loop(0, LAYERS, body, updated)


def held_otherwise(call: OpCall, read: Arrays, held: Arrays) -> Any:
    """The stacks have another dtype and shape than the caches of a call."""

    def body(layer: Any, held: Arrays) -> Arrays:
        caches = {name: call.specs[name] for name in held}
        parts = {name: held[name][layer].reshape(spec.shape) for name, spec in caches.items()}
        updated = {name: jax.lax.bitcast_convert_type(parts[name], spec.dtype) for name, spec in caches.items()}
        _, new = call(part(read, layer), updated)
        values = {name: jax.lax.bitcast_convert_type(new[name], stack.dtype) for name, stack in held.items()}
        return {name: stack.at[layer].set(values[name].reshape(stack.shape[1:])) for name, stack in held.items()}

    return jax.lax.fori_loop(0, LAYERS, body, held)


def handed_on(call: Call, read: Arrays, updated: Arrays) -> Any:
    """Two devices update their caches and hand them on to each other."""

    def body(layer: Any, updated: Arrays) -> Arrays:
        _, new = call(part(read, layer), part(updated, 0))
        new = jax.lax.ppermute(new, "x", [(0, 1), (1, 0)])
        return {name: updated[name].at[0].set(value) for name, value in new.items()}

    return jax.lax.fori_loop(0, LAYERS, body, updated)


def one_ref_in_a_loop(call: OpCall, read: Arrays, cache: Arrays) -> Any:
    refs = {name: jax.new_ref(array) for name, array in cache.items()}
    results = jax.lax.scan(lambda _, layer: (0, call.update(layer, refs)), 0, read)[1]
    return results, {name: ref[...] for name, ref in refs.items()}


def refs_of_parts(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    """Layers whose stack is a Ref too, into which each part is stored when it is updated."""
    stacks = {name: jax.new_ref(stack) for name, stack in updated.items()}
    results = []
    for layer in range(LAYERS):
        refs = {name: jax.new_ref(stack[layer]) for name, stack in stacks.items()}
        results.append(call.update(part(read, layer), refs))
        for name, ref in refs.items():
            stacks[name][layer] = ref[...]
    return results, {name: stack[...] for name, stack in stacks.items()}


def _pages(call: OpCall, read: Arrays, layer: Any) -> Arrays:
    """The arguments of a layer whose pages follow those of the layers before it."""
    offsets: Arrays = {}
    for cache in call.op.mutates:
        entries = call.specs[cache].shape[0]
        offsets |= {name: read[name] + layer * entries for name in call.op.indices_of(cache) if name in read}
    return read | offsets


def _joined(updated: Arrays) -> Arrays:
    return {name: stack.reshape(-1, *stack.shape[2:]) for name, stack in updated.items()}


def pages(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    cache, results = _joined(updated), []
    for layer in range(LAYERS):
        result, cache = call(_pages(call, part(read, layer), layer), cache)
        results.append(result)
    return results, cache


def pages_in_a_scan(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    def body(carry: Any, read: Arrays) -> Any:
        layer, cache = carry
        results, cache = call(_pages(call, read, layer), cache)
        return (layer + 1, cache), results

    return jax.lax.scan(body, (jnp.int32(0), _joined(updated)), read)


def prefix_written_back(call: Call, read: Arrays, wide: Arrays) -> Any:
    """The first half of each cache is updated, and takes its place."""
    sizes = {name: array.shape[0] // 2 for name, array in wide.items()}
    results, new = call(read, {name: wide[name][:size] for name, size in sizes.items()})
    return results, {name: wide[name].at[: sizes[name]].set(value) for name, value in new.items()}


def prefix_written_beside(call: Call, read: Arrays, wide: Arrays) -> Any:
    """The new values overlap the place of the old ones."""
    sizes = {name: array.shape[0] // 2 for name, array in wide.items()}
    results, new = call(read, {name: wide[name][:size] for name, size in sizes.items()})
    return results, {name: wide[name].at[1 : 1 + sizes[name]].set(value) for name, value in new.items()}


def read_and_updated(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    """Two arguments are one part of a stack, which is written back."""
    other, cache = call.alike

    def body(layer: Any, updated: Arrays) -> Arrays:
        arrays = part(read | updated, layer)
        _, new = call(*call.split(arrays | {other: arrays[cache]}))
        return {name: updated[name].at[layer].set(value) for name, value in new.items()}

    return jax.lax.fori_loop(0, LAYERS, body, updated)


def stored_over(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    """A result takes the place of the part that it is computed from."""
    name, result = call.stored_over
    constants = {other: array for other, array in read.items() if other != name}

    def body(layer: Any, stack: jax.Array) -> jax.Array:
        results, _ = call(part(constants, layer) | {name: stack[layer]}, {})
        return stack.at[layer].set(results[result])

    return jax.lax.fori_loop(0, LAYERS, body, read[name])


def in_branches(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    """A scan in which every other layer calls."""

    def body(layer: Any, arrays: tuple[Arrays, Arrays]) -> Any:
        read, updated = arrays
        nothing = [jnp.zeros(result.shape, result.dtype) for result in call.results()]
        return layer + 1, jax.lax.cond(layer % 2 == 0, lambda: call(read, updated), lambda: (nothing, updated))

    return jax.lax.scan(body, 0, (read, updated))


def beside_a_callback(call: Call, read: Arrays, updated: Arrays) -> Any:
    """JAX lowers callbacks where a GPU is; to XLA they are calls of this kind."""
    results = []
    for layer in range(LAYERS):
        result, new = call(part(read, layer), part(updated, layer))
        types = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in new.values()]
        after = jax.ffi.ffi_call("callback", types)(*new.values())
        results.append((result, call(part(read, layer), dict(zip(new, after, strict=True)))))
    return results


def batched(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    axes = call.batch_axes
    return jax.vmap(call, tuple({name: axes[name] for name in arrays} for arrays in (read, updated)))(read, updated)


def batched_parts(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    return [batched(call, part(read, layer), part(updated, layer)) for layer in range(LAYERS)]


def _loss(call: OpCall, read: Arrays) -> jax.Array:
    results = dict(zip(call.op.outputs, call(read, {})[0], strict=True))
    return sum((results[name].astype(jnp.float32) ** 2).sum() for name in call.op.differentiable)


def gradient_of_slices(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    differentiated = {name: read[name] for name in call.differentiated}
    return jax.grad(lambda moving: sum(_loss(call, part(read | moving, layer)) for layer in range(LAYERS)))(
        differentiated
    )


def gradient_of_checkpoints(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    """Gradient of a scan whose layers are computed again for it."""

    def body(loss: jax.Array, read: Arrays) -> tuple[jax.Array, None]:
        return loss + _loss(call, read), None

    differentiated = {name: read[name] for name in call.differentiated}
    return jax.grad(lambda moving: jax.lax.scan(jax.checkpoint(body), 0.0, read | moving)[0])(differentiated)


def exported(call: OpCall, read: Arrays, updated: Arrays) -> Any:
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (read, updated))
    function = jax.jit(partial(stacked.slices, call))
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    export = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)
    return export(*shapes).call(read, updated)


Arguments = Callable[[OpCall], tuple[Arrays, Any]]


def parts(call: OpCall) -> tuple[Arrays, Arrays]:
    return call.split(call.shapes(LAYERS))


def one_cache(call: OpCall) -> tuple[Arrays, Arrays]:
    return call.split(call.shapes(LAYERS))[0], call.split(call.shapes())[1]


def alone(call: OpCall) -> tuple[Arrays, Arrays]:
    return call.split(call.shapes())


def pairs(call: OpCall) -> tuple[Arrays, Arrays]:
    return call.split(call.shapes(LAYERS, 2))


OTHERWISE = {"uint8": "int8", "int8": "uint8", "bfloat16": "int16", "float32": "int32", "int32": "float32"}


def held(call: OpCall) -> tuple[Arrays, Arrays]:
    """Layers whose caches have their first two axes as one."""
    read, updated = parts(call)
    shapes = {name: (LAYERS, a.shape[1] * a.shape[2], *a.shape[3:]) for name, a in updated.items()}
    return read, {name: jax.ShapeDtypeStruct(shapes[name], OTHERWISE[a.dtype.name]) for name, a in updated.items()}


def own_caches(call: OpCall) -> tuple[Arrays, list[Arrays]]:
    return one_cache(call)[0], [one_cache(call)[1]] * LAYERS


def wide_caches(call: OpCall) -> tuple[Arrays, Arrays]:
    read, caches = call.split(call.shapes())
    return read, {n: jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype) for n, a in caches.items()}


def batch(call: OpCall) -> tuple[Arrays, Arrays]:
    return call.split(call.shapes(batch=BATCH))


def batch_of_parts(call: OpCall) -> tuple[Arrays, Arrays]:
    return call.split(call.shapes(LAYERS, batch=BATCH))


def two_devices(call: OpCall) -> tuple[Arrays, Arrays]:
    return call.split(call.shapes(2 * LAYERS))


def updates(call: OpCall) -> bool:
    return bool(call.op.mutates)


def has_pages(call: OpCall) -> bool:
    return {*call.op.mutates} <= {*call.op.pools} and updates(call)


def has_rows(call: OpCall) -> bool:
    return any("T" in call.op.tensors[name].names for name in call.specs)


def reads_what_it_stores(call: OpCall) -> bool:
    return not updates(call) and call.stored_over is not None


@dataclass(frozen=True)
class Form:
    function: Callable[[Any, Any, Any], Any]
    takes: Callable[[OpCall], Any] = lambda call: True  # the first call of an op that it is for
    arguments: Arguments = parts
    calls: int | None = LAYERS  # that a run makes; None: as many as without fusions
    in_place: bool = False  # donated caches are not moved, others once
    fused: bool = False  # each call with the slices that it reads, of which no pool is moved
    spread: str = ""  # over two devices: "layers" by hand, or "tokens" by XLA
    options: Mapping[str, Any] | None = None  # of XLA


FORMS = (
    Form(stacked.slices, fused=True),
    Form(stacked.scanned_and_used, fused=True),
    Form(stacked.looped, fused=True),
    Form(batched_parts, has_rows, batch_of_parts, calls=None),
    Form(stacked.scanned, spread="tokens"),
    Form(stacked.restacked, updates),
    Form(stacked.written_back, updates),
    Form(stacked.prefixes, updates),
    Form(stacked.by_refs, updates),
    Form(stacked.beside_the_old, updates),
    Form(refs_of_parts, updates),
    Form(one_ref_in_a_loop, updates, one_cache, in_place=True),
    Form(twice, updates, one_cache, calls=2, in_place=True),
    Form(twice_from_one, updates, one_cache, calls=2),
    Form(caches_of_their_own, updates, own_caches, in_place=True),
    Form(cache_in_a_carry, updates, one_cache, in_place=True),
    Form(cache_in_a_carry, updates, one_cache, in_place=True, options=DOUBLE_BUFFERED),
    Form(until_it_ends, updates, alone, calls=1, in_place=True),
    Form(layers_in_steps, updates, calls=STEPS * LAYERS),
    Form(second_of_two, updates, pairs),
    Form(held_otherwise, updates, held),
    Form(pages, has_pages, in_place=True),
    Form(pages_in_a_scan, has_pages, in_place=True),
    Form(batched, updates, batch, calls=None, in_place=True),
    Form(prefix_written_back, updates, wide_caches, calls=1),
    Form(prefix_written_beside, updates, wide_caches, calls=1),
    Form(read_and_updated, lambda call: call.alike),
    Form(stored_over, reads_what_it_stores),
    Form(in_branches, updates),
    Form(beside_a_callback, updates, calls=2 * LAYERS),
    Form(gradient_of_slices, lambda call: call.differentiated, calls=None),
    Form(gradient_of_checkpoints, lambda call: call.differentiated, calls=None),
    Form(stacked.slices, spread="tokens"),
    Form(stacked.written_back, updates, spread="tokens"),
    Form(stacked.scanned, updates, two_devices, spread="layers"),
    Form(stacked.slices, updates, two_devices, spread="layers"),
    Form(stacked.written_back, updates, two_devices, spread="layers"),
    Form(stacked.looped, updates, two_devices, spread="layers"),
    Form(handed_on, updates, two_devices, spread="layers"),
    Form(exported, updates),
)
