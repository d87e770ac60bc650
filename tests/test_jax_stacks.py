"""Ops on parts of stacks in one jitted function, as models hold weights and caches: values, arguments and launches.

XLA takes slices and stores of parts into a fusion with a custom call, and ignores there which operand a result is. What
it makes of the programs without a GPU is looked at in tests/test_jax_programs.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import kit
import launched
import numpy as np
import pytest
from conftest import EVERYTHING
from launched import check_launches
from stacked import (
    FUSED,
    LAYERS,
    Arrays,
    Call,
    beside_the_old,
    by_refs,
    calling,
    looped,
    part,
    prefixes,
    restacked,
    scanned,
    scanned_and_used,
    slices,
    written_back,
)

from xmla import jax_api
from xmla.core.op import Case, Op, plan_call
from xmla.core.registry import registry
from xmla.core.values import H200, Device
from xmla.jax_api import _launcher
from xmla.jax_api._run import describe, spec_of

UPDATING = [op for op in registry().values() if op.mutates]


def fused_case(op: Op) -> Case:
    """The smallest case whose updated arguments are parts that XLA fuses."""
    cases = [
        case for case in op.cases if all(s.nbytes % FUSED == 0 for n, s in kit.specs(case).items() if n in op.mutates)
    ]
    return min(cases, key=nbytes)


def nbytes(case: Case) -> int:
    return sum(spec.nbytes for spec in kit.specs(case).values())


def of_names(arrays: Arrays, names: Iterable[str]) -> Arrays:
    return {name: jnp.asarray(arrays[name]) for name in names}


FORMS = (slices, restacked, written_back, scanned, looped, prefixes, by_refs, beside_the_old)


@dataclass(frozen=True)
class Layers:
    """Inputs of every layer as stacks, and what a call on arrays of their own gives of each."""

    op: Op
    call: Call
    read: Arrays
    updated: Arrays
    want: list[tuple[list[Any], Arrays]]

    @classmethod
    def of(cls, op: Op, case: Case, same: tuple[str, str] | None = None) -> "Layers":
        """The layers of a case; with `same`, two arguments are one array."""
        layers = [{n: np.ascontiguousarray(a) for n, a in kit.make(case, seed).items()} for seed in range(LAYERS)]
        if same is not None:
            layers = [layer | {same[0]: layer[same[1]]} for layer in layers]
        stacks = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
        updated = {name: stacks.pop(name) for name in op.mutates}
        call = calling(op, case.attrs)
        want = [call(of_names(layer, stacks), of_names(layer, updated)) for layer in layers]
        return cls(op, call, stacks, updated, want)

    def arguments(self) -> tuple[Arrays, Arrays]:
        return jax.tree.map(jnp.asarray, (self.read, self.updated))

    def compare(self, found: Any) -> None:
        for layer, (results, new) in enumerate(self.want):
            got = found[layer] if isinstance(found, list) else jax.tree.map(itemgetter(layer), found)
            for name, value, right in zip(self.op.outputs, got[0], results, strict=True):
                kit.assert_bits_equal(f"{name} of layer {layer}", value, right)
            for name, right in new.items():
                kit.assert_bits_equal(f"{name} of layer {layer}", got[1][name], right)


@cache
def fused_layers(op: Op) -> Layers:
    return Layers.of(op, fused_case(op))


DONATIONS = [
    (op, form, donated)
    for number, op in enumerate(UPDATING)
    for place, form in enumerate(FORMS)
    for donated in (False, True)
    if EVERYTHING or (number + place) % 2 == donated
]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    ("op", "form", "donated"), DONATIONS, ids=lambda each: getattr(each, "__name__", kit.case_id(each))
)
@pytest.mark.usefixtures("device")
def test_parts_of_stacks_have_the_bits_of_arrays_of_their_own(op: Op, form: Callable[..., Any], donated: bool) -> None:
    """Of an op every other form is donated; XMLA_ALL takes each with donation and without."""
    layers = fused_layers(op)
    arguments = layers.arguments()
    found = jax.block_until_ready(jax.jit(partial(form, layers.call), donate_argnums=1 if donated else ())(*arguments))
    if form is beside_the_old:
        found, old = found
        for name, stack in layers.updated.items():
            kit.assert_bits_equal(name, old[name], stack)
    layers.compare(found)
    for name, stack in layers.updated.items():
        if not donated:
            kit.assert_bits_equal(f"the argument {name}", arguments[1][name], stack)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [slices, scanned, written_back, looped], ids=lambda form: form.__name__)
@pytest.mark.parametrize("way", ["export", "jaxlib"])
@pytest.mark.parametrize("op", UPDATING, ids=lambda op: op.name)
def test_other_ways_of_launching_have_the_same_bits(
    op: Op, way: str, form: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of exports, and of machines without a C++ compiler, are jaxlib's own calls."""
    layers = fused_layers(op)
    program = jax.jit(partial(form, layers.call))
    if way == "export":
        program = jax.export.export(program, disabled_checks=jax_api.EXPORT_CHECKS)(*layers.arguments()).call
    else:
        monkeypatch.setattr(_launcher, "library", lambda: None)
    arguments = layers.arguments()
    layers.compare(jax.block_until_ready(program(*arguments)))
    for name, stack in layers.updated.items():
        kit.assert_bits_equal(f"the argument {name}", arguments[1][name], stack)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("form", [slices, scanned], ids=lambda form: form.__name__)
@pytest.mark.parametrize("op", UPDATING, ids=lambda op: op.name)
def test_captured_graphs_take_other_addresses(op: Op, form: Callable[..., Any]) -> None:
    """XLA captures calls as a CUDA graph and updates its addresses; each time here all arrays are elsewhere."""
    layers = fused_layers(op)
    program = jax.jit(partial(form, layers.call), donate_argnums=1)
    every = [program(*layers.arguments()) for _ in range(5)]
    for found in every:
        layers.compare(found)


@pytest.mark.parametrize("op", UPDATING, ids=lambda op: op.name)
@pytest.mark.usefixtures("device")
def test_a_callback_beside_changes_nothing(op: Op) -> None:
    layers = fused_layers(op)

    def with_callbacks(read: Arrays, updated: Arrays) -> Any:
        found = []
        for layer in range(LAYERS):
            results, new = layers.call(part(read, layer), part(updated, layer))
            shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in new.items()}
            found.append((results, jax.pure_callback(lambda host: host, shapes, new)))
        return found

    layers.compare(jax.block_until_ready(jax.jit(with_callbacks)(*layers.arguments())))


def alike(op: Op, case: Case, names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of an argument and another one that is updated, of one shape and dtype."""
    kinds = {name: (spec.shape, spec.dtype) for name, spec in kit.specs(case).items()}
    return [(a, b) for b in names for a in kinds if a != b and kinds[a] == kinds[b]]


TWICE = [(op, case, pair) for op, case in kit.all_cases() for pair in alike(op, case, op.mutates)]


@pytest.mark.parametrize("form", [slices, written_back, looped], ids=lambda form: form.__name__)
@pytest.mark.parametrize(("op", "case", "pair"), TWICE, ids=kit.case_id)
@pytest.mark.usefixtures("device")
def test_one_part_for_two_arguments(op: Op, case: Case, pair: tuple[str, str], form: Callable[..., Any]) -> None:
    """A call reads the part as it was, also where its new value is stored in the part's place."""
    other, written = pair
    layers = Layers.of(op, case, same=pair)
    program = jax.jit(lambda read, updated: form(lambda r, u: layers.call(*moved(r, u)), read, updated))

    def moved(read: Arrays, updated: Arrays) -> tuple[Arrays, Arrays]:
        """The argument `other` is the very value of `written`."""
        if other in updated:
            return read, updated | {other: updated[written]}
        return read | {other: updated[written]}, updated

    layers.compare(jax.block_until_ready(program(*layers.arguments())))


def stored_over(op: Op) -> tuple[str, str, Case] | None:
    """A case of an op with an argument that is only read and a result of its shape and dtype."""
    for case in op.cases:
        inputs = kit.make(case)
        results = op.bind(
            {n: spec_of(np.ascontiguousarray(inputs[n])) if n in inputs else None for n in op.tensors},
            op.attributes(**case.attrs),
        ).results
        for name, array in inputs.items():
            for result, spec in results.items():
                if (
                    name not in op.mutates
                    and array.size
                    and (spec.shape, spec.dtype) == (array.shape, array.dtype.name)
                ):
                    return name, result, case
    return None


OVER = [(op, *found) for op in registry().values() if (found := stored_over(op))]


@pytest.mark.parametrize(("op", "name", "result", "case"), OVER, ids=kit.case_id)
@pytest.mark.usefixtures("device")
def test_a_result_stored_over_the_part_that_it_is_computed_from(op: Op, name: str, result: str, case: Case) -> None:
    layers = Layers.of(op, case)
    place = list(op.outputs).index(result)

    def over(read: Arrays, updated: Arrays) -> jax.Array:
        others = {n: stack for n, stack in read.items() if n != name}

        def body(layer: Any, stack: jax.Array) -> jax.Array:
            results, _ = layers.call(part(others, layer) | {name: stack[layer]}, part(updated, layer))
            return stack.at[layer].set(results[place])

        return jax.lax.fori_loop(0, LAYERS, body, read[name])

    found = jax.jit(over)(*layers.arguments())
    for layer, (results, _) in enumerate(layers.want):
        kit.assert_bits_equal(f"{result} of layer {layer}", found[layer], results[place])


@pytest.mark.gpu
@pytest.mark.parametrize("form", [slices, scanned_and_used, looped], ids=lambda form: form.__name__)
@pytest.mark.parametrize("op", registry().values(), ids=lambda op: op.name)
def test_a_program_launches_what_its_calls_launch(op: Op, form: Callable[..., Any]) -> None:
    case = fused_case(op) if op.mutates else min(op.cases, key=nbytes)
    inputs = {name: np.ascontiguousarray(array) for name, array in kit.make(case).items()}
    specs = {name: spec_of(array) for name, array in inputs.items()}
    device: Device = describe(jax.devices()[0])
    plan, _ = plan_call(op, tuple(specs.get(name) for name in op.tensors), op.attributes(**case.attrs), device)
    stacks = {name: jnp.stack([jnp.asarray(array)] * LAYERS) for name, array in inputs.items()}
    updated = {name: stacks.pop(name) for name in op.mutates}
    program = jax.jit(partial(form, calling(op, case.attrs)))
    check_launches(lambda: program(stacks, updated), plan, LAYERS)


@pytest.mark.parametrize(
    ("profiles", "refused"),
    [
        ([(2, 2)], ""),
        ([(0, 0, "AFTER"), (0, 2, "BEFORE AFTER"), (2, 2)], ""),
        ([(2, 1)], "expected .* of .*read_indexer_cache"), ([(2, 4)], "expected .* of .*read_indexer_cache"),
        ([(2, 2, "AFTER"), (2, 1)], "expected .* of .*read_indexer_cache"),
        ([(2, 2, 1)], "expected .* of .*read_indexer_cache"),
        ([(2, 2, "BEFORE")] * launched.PROFILES, "no profile has what is around the call"),
    ],
    ids=["all", "missed", "too few", "too many", "missed, then too few", "elsewhere", "all missed"],
)  # fmt: skip
def test_a_profile_that_misses_what_is_around_a_call_is_taken_again(
    profiles: list[tuple[Any, ...]], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the launches of GPU after GPU, and on which sides the second one's marks are missing."""
    op = registry()["read_indexer_cache"]
    specs = {name: spec_of(array) for name, array in kit.make(op.cases[0]).items()}
    attrs = op.attributes(**op.cases[0].attrs)
    plan, _ = plan_call(op, tuple(specs.get(name) for name in op.tensors), attrs, H200)
    (launch,) = plan.active
    left = []
    for each in profiles:
        counts, missing = [count for count in each if isinstance(count, int)], {"", *str(each[-1]).split()}
        kernels = Counter({(gpu, name): count for gpu, count in enumerate(counts) for name in (launch.name, "of XLA")})
        for side, name in (("BEFORE", launched.BEFORE), ("AFTER", launched.AFTER)):
            kernels += Counter({(gpu, f"void kernel<{name} >(int)"): 1 for gpu in range(1 + (side not in missing))})
        left.append(kernels)
    monkeypatch.setattr(launched, "run", lambda function: function())
    monkeypatch.setattr(launched, "profiled", lambda _: left.pop(0))
    with pytest.raises(AssertionError, match=refused) if refused else nullcontext():
        assert check_launches(lambda: None, plan, calls=2, gpus=2) == [2, 2]
    assert not left
