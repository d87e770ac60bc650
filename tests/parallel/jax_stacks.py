"""Ops on parts of stacks, as models hold weights and caches, over two devices against arrays of their own on one; a
script, since the devices are made first.

python jax_stacks.py WAY [OP …]      WAY is layers: each device has layers of its own, by `shard_map`; or auto or
                                     explicit: `jit` over a mesh axis of that kind, which shards the tokens of all.
Prints a JSON line for each op: its programs and, on GPUs, the kernels of the op that each device launched in each.
Without XMLA_ALL an op's form has one of the ways, its neighbours the others: ops that update have every way, those that
only read two. Each op over either kind of axis is in jax_jit.py and jax_explicit.py, too.
"""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["JAX_NUM_CPU_DEVICES"] = "2"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent / "shared"))

import json
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import kit
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_jit import OPS, comparison, mesh_of
from stacked import (
    FUSED,
    LAYERS,
    Arrays,
    by_refs,
    calling,
    looped,
    over_devices,
    prefixes,
    restacked,
    scanned,
    slices,
    written_back,
)

from tools.environment import EVERYTHING, HAS_GPU
from xmla.core.op import Case, Op, plan_call
from xmla.core.values import GRADIENT, Spec
from xmla.jax_api._run import describe
from xmla.jax_api._sharding import shared_axes

if HAS_GPU:
    from launched import check_launches

DEVICES = 2
WAYS = ("layers", "auto", "explicit")
Form = Callable[..., Any]
UPDATING: tuple[Form, ...] = (slices, written_back, scanned, looped, by_refs)
READING: tuple[Form, ...] = (scanned, looped)
if EVERYTHING:
    UPDATING, READING = (*UPDATING, restacked, prefixes), (*READING, slices)


def copies(array: jax.Array) -> list[jax.Array]:
    """An array, or every device's copy of it."""
    return [shard.data for shard in array.addressable_shards] if array.is_fully_replicated else [array]


def even_case(op: Op) -> tuple[Case, int] | None:
    """The smallest case whose tokens two devices can share, and their number; XLA fuses the parts that it updates."""
    found = []
    for case in op.cases:
        arrays = kit.make(case)
        labelled = [
            pair for name, array in arrays.items() for pair in zip(op.tensors[name].names, array.shape, strict=True)
        ]
        sizes = {size for axis, size in labelled if axis == "T"}
        tokens = min(sizes, default=0) // DEVICES * DEVICES
        # Without requests, which have a number of tokens each, the last token can be left out.
        possible = tokens and (sizes == {tokens} or not {"B", "B+1"} & {axis for axis, _ in labelled})
        if possible and all(arrays[name].nbytes % FUSED == 0 for name in op.mutates):
            found.append((sum(array.nbytes for array in arrays.values()), case, tokens))
    return min(found, key=itemgetter(0))[1:] if found else None


@dataclass(frozen=True)
class Stacks:
    """Inputs of layers, which are stacks over a mesh."""

    op: Op
    case: Case
    layers: list[dict[str, np.ndarray]]
    mesh: Mesh
    own: bool  # each device has layers of its own; otherwise they share the tokens of every layer

    @classmethod
    def over(cls, mesh: Mesh, op: Op, case: Case, tokens: int, own: bool) -> "Stacks":
        seeds = range(LAYERS * DEVICES if own else LAYERS)
        layers = [kit.with_axis(op, kit.make(case, seed), "T", tokens) for seed in seeds]
        return cls(op, case, layers, mesh, own)

    @cached_property
    def attributes(self) -> dict[str, Any]:
        return dict(self.case.attrs) | ({"batch_invariant": True} if "batch_invariant" in self.op.defaults else {})

    @cached_property
    def want(self) -> list[list[Any]]:
        """Results and new values of each layer, of a call on arrays of its own on one device."""
        call = calling(self.op, self.attributes)
        return [self.leaves(call(*self.split(jax.tree.map(jnp.asarray, arrays)))) for arrays in self.layers]

    @property
    def divided(self) -> bool:
        """Whether each device computes the results of its tokens alone."""
        return not self.own and "T" in shared_axes(self.op, list(self.layers[0]))

    def leaves(self, found: tuple[list[Any], Arrays]) -> list[Any]:
        results, new = found
        return [*results, *map(new.get, self.op.mutates)]

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """The arrays that a call reads, and those that it updates."""
        names = self.op.mutates
        return {n: a for n, a in arrays.items() if n not in names}, {n: arrays[n] for n in names}

    def arguments(self) -> tuple[Arrays, Arrays]:
        placed = {}
        for name in self.layers[0]:
            axes = self.op.tensors[name].names
            shared = ("x" if axis == "T" and name not in self.op.mutates else None for axis in axes)
            spec = P("x") if self.own else P(None, *shared)
            placed[name] = jax.device_put(self.stack(name), NamedSharding(self.mesh, spec))
        return self.split(placed)

    def stack(self, name: str) -> np.ndarray:
        return np.stack([layer[name] for layer in self.layers])

    def program(self, form: Form) -> Callable[[Arrays, Arrays], Any]:
        function = partial(form, calling(self.op, self.attributes))
        return over_devices(function, self.mesh) if self.own else function

    def compare(self, found: Any) -> None:
        """Compare each layer, and every device's copy of it, with a call on arrays of its own."""
        for layer, arrays in enumerate(self.layers):
            device, own = divmod(layer, LAYERS)
            if not isinstance(found, list):
                got = jax.tree.map(itemgetter(layer), found)
            else:
                got = jax.tree.map(itemgetter(device), found[own]) if self.own else found[own]
            same = comparison(self.op, self.case, kit.copies(arrays))
            names = [*self.op.outputs, *self.op.mutates]
            for index, (name, mine, theirs) in enumerate(zip(names, self.leaves(got), self.want[layer], strict=True)):
                added = self.divided and name in self.op.outputs and self.op.outputs[name].sum_over
                for copy in copies(mine):
                    if added:
                        kit.assert_close(f"{name} of layer {layer}", copy, theirs, GRADIENT)
                    else:
                        same(index, copy, theirs)

    def check_launches(self, program: Callable[..., Any]) -> list[int]:
        """Compare the kernels that each GPU launches with its plan; return their numbers."""
        specs = {}
        for name, array in {n: a for arrays in self.arguments() for n, a in arrays.items()}.items():
            shape = array.sharding.shard_shape(array.shape) if self.own or self.divided else array.shape
            specs[name] = Spec(shape[1:], array.dtype.name)
        if self.divided and "request_ids" in self.op.tensors and "request_ids" not in specs:
            tokens = next(spec.shape[0] for name, spec in specs.items() if self.op.tensors[name].names[0] == "T")
            specs["request_ids"] = Spec((tokens,), "int32")
        attrs = self.op.attributes(**self.attributes)
        plan, _ = plan_call(self.op, tuple(map(specs.get, self.op.tensors)), attrs, describe(jax.devices()[0]))
        return check_launches(lambda: program(*self.arguments()), plan, LAYERS, DEVICES)


def check(stacks: Stacks, form: Form, donated: bool) -> list[int]:
    program, arguments = jax.jit(stacks.program(form), donate_argnums=1 if donated else ()), stacks.arguments()
    stacks.compare(jax.block_until_ready(program(*arguments)))
    if not donated:
        for name, array in arguments[1].items():
            for copy in copies(array):
                kit.assert_bits_equal(f"the argument {name}", copy, stacks.stack(name))
    return stacks.check_launches(program) if HAS_GPU else []


def main(way: str, *names: str) -> int:
    """The number of programs that are wrong, each of which is told on stderr."""
    # A form that returns each layer has no stack to put the new values in.
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    wrong = 0
    own, mesh = way == "layers", mesh_of(AxisType.Explicit if way == "explicit" else AxisType.Auto, x=DEVICES)
    numbers = {name: number for number, name in enumerate(sorted(OPS, key=lambda name: not OPS[name].mutates))}
    for op in map(OPS.__getitem__, names or OPS):
        turn = WAYS.index(way) - numbers[op.name]
        forms = UPDATING if op.mutates else READING
        forms = [form for place, form in enumerate(forms) if EVERYTHING or (place - turn) % len(WAYS) == 0]
        if not forms or (case := even_case(op)) is None:
            continue
        stacks, programs = Stacks.over(mesh, op, *case, own), {}
        for form in forms:
            for donated in [True, *[False] * (form is slices or EVERYTHING)] if op.mutates else [False]:
                name = f"{form.__name__}{', donated' * donated}"
                try:
                    programs[name] = check(stacks, form, donated)
                except Exception as error:
                    error.add_note(f"{op.name}, {stacks.case.name}: {name}")
                    traceback.print_exception(error)
                    wrong += 1
        print(json.dumps({"op": op.name, "case": stacks.case.name, "launches": programs}), flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
