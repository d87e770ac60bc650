"""Compiles programs that call ops, in every form, as XLA does for an H200, and tells what is wrong with them.

    PYTHONPATH=tests/shared:. python tests/jax_programs/programs.py SHARE OP …
SHARE is all, or 0 or 1 for a half of an op's programs. An op is a name of the registry, or flax: layers of Flax's.
Prints a line of JSON for each: the release of JAX, the forms of its programs, and the faults. No GPU is needed.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import pipeline  # isort: skip  (before JAX)
import flax_layers
import hlo
import jax
import training
from forms import FORMS, Form, exported
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax_triton import triton_lib
from op_call import OpCall, op_calls
from stacked import over_devices

from xmla.core.compile import Specialization
from xmla.core.registry import registry
from xmla.core.values import H200, assume_device
from xmla.jax_api import _jax_triton, _launcher, _primitive

ONE_DEVICE = SingleDeviceSharding(pipeline.DEVICES[0])
XLA_NAMES = {
    "bool": "pred", "uint8": "u8", "int8": "s8", "int32": "s32", "float8_e4m3fn": "f8e4m3fn", "float16": "f16",
    "bfloat16": "bf16", "float32": "f32",
}  # fmt: skip
OPS = sorted(registry(), key=lambda name: not registry()[name].mutates)  # of either kind every other one
UNFUSED = {"xla_gpu_enable_dynamic_slice_fusion": False}  # without the fusions of custom calls with slices
PTX = {"cubin": b"", "ptx": "", "ttir": "", "ttgir": "", "llir": ""}
FACTS = {"name": "kernel", "num_warps": 4, "shared": 0, "global_scratch_size": 0}


def compiled(specialization: Specialization, *_: int) -> SimpleNamespace:
    """A kernel of which no machine code is made."""
    return SimpleNamespace(metadata=SimpleNamespace(**FACTS, num_ctas=specialization.num_ctas), asm=PTX)


def stand_in() -> None:
    """Calls are lowered for an H200, their kernels not compiled; exports call what has the launcher's name."""
    pipeline.register(_launcher.TARGET, "callback")
    _launcher.library = lambda: SimpleNamespace(xmla_add_kernel=lambda *_: None)
    _launcher.compiled = _jax_triton.compiled = compiled
    _primitive.lowered_for = lambda *_: H200
    triton_lib.CUSTOM_CALL_TARGET_NAME = _launcher.TARGET


def placed(form: Form, call: OpCall, arguments: Any) -> Any:
    """The arguments' shapes, on the devices that hold them."""

    def place(path: Any, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding: Any = ONE_DEVICE
        if form.spread == "layers":
            sharding = NamedSharding(pipeline.MESH, P("x"))
        elif form.spread == "tokens":
            whole = call.op.mutates or call.op.sums_over_tokens
            axes = ["x" if axis == "T" and not whole else None for axis in call.op.tensors[path[-1].key].names]
            sharding = NamedSharding(pipeline.MESH, P(None, *axes))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, arguments)


def arrays(shapes: Iterable[Any]) -> set[hlo.Array]:
    """The arrays as XLA's text has them."""
    return {(XLA_NAMES[array.dtype.name], prod(array.shape)) for array in shapes}


def capacity(call: OpCall, updated: Any) -> int:
    """How many caches of a call's size the arguments have."""
    leaves = jax.tree_util.tree_leaves_with_path(updated)
    return sum(prod(array.shape) // prod(call.specs[path[-1].key].shape) for path, array in leaves)


def faults(form: Form, call: OpCall, donated: bool) -> Iterator[str]:
    function, arguments = partial(form.function, call), placed(form, call, form.arguments(call))
    if form.spread == "layers":
        function = over_devices(function, pipeline.MESH)
    program = pipeline.program(function, arguments, donated=donated, options=form.options)
    # A kernel takes an array twice that stands in for one which the call has not, and jaxlib's call returns both.
    yield from program.faults(apart=form.function is not exported)
    calls = form.calls
    if calls is None:
        calls = pipeline.program(function, arguments, donated=donated, options=UNFUSED).calls
    elif form.function is exported:
        calls *= len(call.plan.active)
    if program.calls != calls:
        yield f"{program.calls} calls, expected {calls}"
    read, updated = call.split(call.shapes())
    if form.fused:
        if alone := [launch.call.name for launch in program.launches if not launch.fused]:
            yield f"{', '.join(alone)}: not in a fusion with slices of operands"
        pools = {name: array for name, array in read.items() if name in call.op.pools}
        results = [*call.results(), *updated.values()]
        if moved := program.moved(arrays(pools.values()) - arrays(results)):
            yield f"{moved} pools that are read are moved, expected 0"
    if form.in_place:
        most = 0 if donated else capacity(call, arguments[1])
        if (moved := program.moved(arrays(updated.values()))) > most:
            yield f"{moved} caches are moved, expected {most}"


def programs_of(name: str, share: str) -> Iterator[tuple[str, str, Iterator[str]]]:
    """The form of each program, what else it is, and its faults, of which another share's are not looked for.

    Of an op that updates either share has every form: one with donation, the other without.
    """
    calls = op_calls(registry()[name])
    number = OPS.index(name)
    for place, form in enumerate(FORMS):
        call = next(filter(form.takes, calls), None)
        if call is not None:
            for donated in (False, True) if call.op.mutates else (False,):
                over = f"{form.spread} over devices, " if form.spread else ""
                by = f", {', '.join(form.options)}" if form.options else ""
                details = f"{over}{call.case.name}{', donated' if donated else ''}{by}"
                own = share in ("all", str((number + place + donated) % 2))
                yield form.function.__name__, details, faults(form, call, donated) if own else iter(())


def on_one_device(shapes: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=ONE_DEVICE), shapes)


def faults_of_layers(layers: Callable[[], tuple[Callable[..., Any], Any]], donated: bool) -> Iterator[str]:
    function, shapes = layers()
    program = pipeline.program(function, on_one_device(shapes), donated=donated)
    yield from program.faults()
    if program.calls != flax_layers.CALLS:
        yield f"{program.calls} calls, expected {flax_layers.CALLS}"


def faults_of_training() -> Iterator[str]:
    function, shapes = training.joint_step()
    program = pipeline.program(function, on_one_device(shapes), options=training.OPTIONS)
    yield from program.faults()
    for name in program.added_in_any_order():
        yield f"{name}: adds to elements in any order"


def programs_of_flax() -> Iterator[tuple[str, str, Iterator[str]]]:
    for layers in (flax_layers.linen_scan, flax_layers.nnx_scan):
        for donated in (False, True):
            yield layers.__name__, "donated" if donated else "", faults_of_layers(layers, donated)
    yield "joint_step", "", faults_of_training()


def main() -> None:
    stand_in()
    share, *names = sys.argv[1:]
    for name in names:
        forms, wrong = set(), []
        for form, details, its_faults in programs_of_flax() if name == "flax" else programs_of(name, share):
            forms.add(form)
            try:
                wrong += [f"{form}, {details}: {fault}" for fault in its_faults]
            except Exception as error:
                error.add_note(f"{name}: {form}, {details}")
                raise
        line = {"op": name, "jax": jax.__version__, "forms": sorted(forms), "faults": wrong}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with assume_device(H200):
        main()
