"""Whether a device supports a call, answered without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from xmla.core.errors import ArgumentError, UnsupportedError, did_you_mean
from xmla.core.op import Op, plan_call
from xmla.core.registry import find_op, registry
from xmla.core.values import DTYPES, Attr, Device, Spec, find_device

# What has run of the kernels for an architecture, as docs/contract.md and the README tell; of others, nothing.
_STAND_IN = "attention's and logits' code on a Hopper GPU, not on the part"
CHECKED = {
    90: "run on H200s", 100: "compiled, not run", 103: "compiled, not run",
    120: "its code on a Hopper GPU, not on the part", 121: "its code on a Hopper GPU, not on the part",
    89: _STAND_IN, 80: _STAND_IN,
}  # fmt: skip


def checked_on(device: Device) -> str:
    """What has run of the kernels for a GPU."""
    return CHECKED.get(device.arch, "nothing")


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a call is supported, and if not the message it would raise. Its truth value is `ok`."""

    ok: bool
    reason: str = ""
    implementation: str = ""  # what a call asks for it by; empty for a composed op, whose steps have their own
    call: str = ""  # the arguments that the answer is for: dtype, shape, and a cache's format
    checked: str = ""  # what has run of the kernels for such a device; empty if the call is not supported

    def __bool__(self) -> bool:
        return self.ok


def supports(op: str, device: Device | str, /, **asked: int | str) -> Support:
    """Whether `op` runs on `device` in this call, according to the declaration and planner that serve it.

        supports("sparse_mla", RTX_PRO_6000, H=16, K=2048, cache="plain")

    Args:
        op: A name of `xmla.torch_api` or `xmla.jax_api`.
        device: One of `xmla.core.values.KNOWN_DEVICES`, any other `Device`, or the name of a device in that list, such
            as "H200".
        asked: Sizes by the declaration's axis names; by the name of a cache its format, and of any argument its dtype.
            Everything else, attributes too, is that of the op's first case, among those with the caches asked for.

    Raises:
        ArgumentError: There is no such op or device; the op has no such axis or argument, or no case with such a cache;
            a size is not an integer.
    """
    if isinstance(device, str):
        device = find_device(device)
    elif not isinstance(device, Device):
        raise ArgumentError(f"supports: device is {type(device).__name__}, expected a Device or the name of one")
    declared = find_op(op, "supports")
    named = {name: kind for name, kind in asked.items() if name in declared.tensors}
    kinds = {name: Attr(name, str, False, None).plain("supports", kind) for name, kind in named.items()}
    sizes = {name: size for name, size in asked.items() if name not in named}
    axes = {axis: Attr(axis, int, False, None).plain("supports", size) for axis, size in sizes.items()}
    known = sorted({name for tensor in declared.tensors.values() for name in tensor.names})
    if unknown := set(axes) - set(known):
        name = min(unknown)
        raise ArgumentError(
            f"supports: axis is {name!r}, expected one of {', '.join(known)}{did_you_mean(name, known)}"
        )
    number, dtypes = _case_with(declared, kinds)
    case = declared.cases[number]
    inputs = case.make(np.random.default_rng(0))
    specs = {}
    for name, tensor in declared.tensors.items():
        if name in inputs:
            array = inputs[name]
            shape = tuple(axes.get(axis, size) for axis, size in zip(tensor.names, array.shape, strict=True))
            specs[name] = Spec(shape, dtypes.get(name, array.dtype.name))
    attrs = declared.attributes(**case.attrs)
    call = _arguments_of(specs, kinds_of(op, number))
    try:
        plan_call(declared, tuple(map(specs.get, declared.tensors)), attrs, device)
    except (ArgumentError, UnsupportedError) as error:
        return Support(False, str(error), call=call)
    problem = declared.bind(specs, attrs)
    asked_by = "" if declared.steps else declared.choose(problem, device)[0].asked
    return Support(True, implementation=asked_by, call=call, checked=checked_on(device))


@cache
def kinds_of(op: str, number: int) -> Mapping[str, tuple[str, ...]]:
    """What each argument of an op's case is: the format of a cache, and the dtype."""
    declared = registry()[op]
    case = declared.cases[number]
    specs = {name: Spec.of_numpy(array) for name, array in case.make(np.random.default_rng(0)).items()}
    formats = declared.bind(specs, declared.attributes(**case.attrs)).formats
    named = {name: getattr(layout, "format", layout.name) for name, layout in formats.items()}
    return {name: (*filter(None, [named.get(name)]), spec.dtype) for name, spec in specs.items()}


def _case_with(op: Op, kinds: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """The first case with caches of these formats, and the dtypes that other arguments have instead of its own."""
    every = range(len(op.cases))
    caches = {name: kind for name, kind in kinds.items() if op.tensors[name].format is not None}
    dtypes = {name: kind for name, kind in kinds.items() if name not in caches}
    for name, kind in dtypes.items():
        if kind not in DTYPES:
            raise ArgumentError(
                f"supports: {name} is {kind!r}, expected one of {', '.join(DTYPES)}{did_you_mean(kind, DTYPES)}"
            )
    for number in every:
        if all(kind in kinds_of(op.name, number).get(name, ()) for name, kind in caches.items()):
            return number, dtypes
    for name, kind in caches.items():
        there = sorted({form for number in every for form in kinds_of(op.name, number).get(name, ())})
        if kind not in there:
            known = f"{', '.join(there)}, which cases of {op.name} have"
            raise ArgumentError(f"supports: {name} is {kind!r}, expected one of {known}{did_you_mean(kind, there)}")
    combination = " and ".join(f"{name} {kind}" for name, kind in caches.items())
    raise ArgumentError(f"supports: {op.name} has no case with {combination} together")


def _arguments_of(specs: Mapping[str, Spec], kinds: Mapping[str, tuple[str, ...]]) -> str:
    """Each argument: its dtype, its shape, and the format of a cache."""
    arguments = [
        f"{name} {spec.dtype}{list(spec.shape)}" + (f" ({kinds[name][0]})" if len(kinds[name]) > 1 else "")
        for name, spec in specs.items()
    ]
    return ", ".join(arguments)
