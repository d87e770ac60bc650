"""Ops on parts of stacks in one jitted function, as models hold weights and caches: values, arguments and launches.

XLA takes slices and stores of parts into a fusion with a custom call, and ignores there which operand a result is. What
it makes of the programs without a GPU is looked at in tests/test_jax_programs.py.
"""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
import torch

from xmla import jax_api
from xmla.core.call import plan_call
from xmla.core.device import Device
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.jax_api._run import _spec, describe

LAYERS = 3
FUSED = 256  # bytes: XLA fuses slices of multiples of it

Arrays = dict[str, Any]
Call = Callable[[Arrays, Arrays], tuple[list[Any], Arrays]]  # read and updated arguments → results, new values
UPDATING = [op for op in registry().values() if op.mutates]


def fused_case(op: Op) -> Case:
    """The smallest case whose updated arguments are parts that XLA fuses."""
    cases = [
        case for case in op.cases if all(a.nbytes % FUSED == 0 for n, a in kit.make(case).items() if n in op.mutates)
    ]
    return min(cases, key=lambda case: sum(array.nbytes for array in kit.make(case).values()))


def calling(op: Op, case: Case) -> Call:
    def call(read: Arrays, updated: Arrays) -> tuple[list[Any], Arrays]:
        arrays = read | updated
        returned = kit.as_tuple(getattr(jax_api, op.name)(*map(arrays.get, op.tensors), **case.attrs))
        return list(returned[: len(op.outputs)]), dict(zip(op.mutates, returned[len(op.outputs) :], strict=True))

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


def looped(call: Call, read: Arrays, updated: Arrays) -> Any:
    """By a dynamic index, each part written back."""
    shapes = jax.eval_shape(call, part(read, 0), part(updated, 0))[0]

    def body(layer: Any, carry: Any) -> Any:
        stacks, updated = carry
        results, new = call(part(read, layer), part(updated, layer))
        stacks = [stack.at[layer].set(result) for stack, result in zip(stacks, results, strict=True)]
        return stacks, {name: updated[name].at[layer].set(value) for name, value in new.items()}

    return jax.lax.fori_loop(0, LAYERS, body, ([jnp.zeros((LAYERS, *s.shape), s.dtype) for s in shapes], updated))


def prefixes(call: Call, read: Arrays, updated: Arrays) -> Any:
    """Of each layer's arrays, which stand at the start of larger ones."""
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


def beside_the_old(call: Call, read: Arrays, updated: Arrays) -> Any:
    """The parts as they were are results, too."""
    return slices(call, read, updated), updated


FORMS = (slices, restacked, written_back, scanned, looped, prefixes, by_refs, beside_the_old)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("op", UPDATING, ids=lambda op: op.name)
@pytest.mark.usefixtures("device")
def test_parts_of_stacks_have_the_bits_of_arrays_of_their_own(op: Op, form: Callable[..., Any], donated: bool) -> None:
    case = fused_case(op)
    call = calling(op, case)
    layers = [kit.make(case, seed) for seed in range(LAYERS)]
    stacks = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    updated = {name: stacks.pop(name) for name in op.mutates}
    want = [
        call({n: jnp.asarray(np.ascontiguousarray(a)) for n, a in layer.items() if n not in updated},
             {n: jnp.asarray(np.ascontiguousarray(layer[n])) for n in updated})
        for layer in layers
    ]  # fmt: skip
    arguments = jax.tree.map(jnp.asarray, (stacks, updated))
    program = jax.jit(partial(form, call), donate_argnums=1 if donated else ())
    found = jax.block_until_ready(program(*arguments))
    if form is beside_the_old:
        found, old = found
        for name, stack in updated.items():
            kit.assert_bits_equal(name, old[name], stack)
    for layer, (results, new) in enumerate(want):
        got = found[layer] if isinstance(found, list) else jax.tree.map(itemgetter(layer), found)
        for name, value, right in zip(op.outputs, got[0], results, strict=True):
            kit.assert_bits_equal(f"{name} of layer {layer}", value, right)
        for name, right in new.items():
            kit.assert_bits_equal(f"{name} of layer {layer}", got[1][name], right)
    for name, stack in updated.items():
        if not donated:
            kit.assert_bits_equal(f"the argument {name}", arguments[1][name], stack)


def launched(function: Callable[[], Any], names: set[str]) -> int:
    """How many kernels of these names a GPU runs in a call."""
    from torch.profiler import ProfilerActivity, profile

    jax.block_until_ready(function())
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        jax.block_until_ready(function())
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.name in names for event in events)


def scanned_and_used(call: Call, read: Arrays, updated: Arrays) -> Any:
    """A layer's results are stacked, and the next layer depends on them."""

    def body(sums: jax.Array, layer: tuple[Arrays, Arrays]) -> tuple[jax.Array, Any]:
        outputs = call(*layer)
        return sums + sum(leaf.reshape(-1)[:8].astype(jnp.float32).sum() for leaf in jax.tree.leaves(outputs)), outputs

    return jax.lax.scan(body, jnp.float32(0), (read, updated))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [slices, scanned_and_used, looped], ids=lambda form: form.__name__)
@pytest.mark.parametrize("op", registry().values(), ids=lambda op: op.name)
def test_a_program_launches_what_its_calls_launch(op: Op, form: Callable[..., Any]) -> None:
    case = fused_case(op) if op.mutates else min(op.cases, key=lambda c: sum(a.nbytes for a in kit.make(c).values()))
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    specs = {name: _spec(array) for name, array in inputs.items()}
    device: Device = describe(jax.devices()[0])
    plan, _ = plan_call(op, tuple(specs.get(name) for name in op.tensors), op.attributes(**case.attrs), device)
    stacks = {name: jnp.stack([jnp.asarray(array)] * LAYERS) for name, array in inputs.items()}
    updated = {name: stacks.pop(name) for name in op.mutates}
    program = jax.jit(partial(form, calling(op, case)))
    want = LAYERS * len(plan.active)
    assert launched(lambda: program(stacks, updated), {launch.name for launch in plan.active}) == want
