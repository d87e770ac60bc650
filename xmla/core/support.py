"""Whether a device supports a call, answered without a GPU."""

from dataclasses import dataclass

import numpy as np

from xmla.core.attribute import Attr
from xmla.core.device import Device, find_device
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.op import plan_call
from xmla.core.registry import registry
from xmla.core.spec import Spec


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a call is supported, and if not the message it would raise. Its truth value is `ok`."""

    ok: bool
    reason: str = ""
    implementation: str = ""  # what a call asks for it by; empty for a composed op, whose steps have their own

    def __bool__(self) -> bool:
        return self.ok


def supports(op: str, device: Device | str, /, **axes: int) -> Support:
    """Whether `op` runs on `device` at these sizes, according to the declaration and planner that serve the call.

        supports("sparse_mla", RTX_PRO_6000, H=16, K=2048)

    Args:
        op: A name of `xmla.torch_api` or `xmla.jax_api`.
        device: One of `xmla.core.device.KNOWN_DEVICES` or `LIMITED_DEVICES`, any other `Device`, or a part of the
            name of a device in those lists, such as "H200".
        axes: Sizes by the declaration's axis names. Other sizes, and the attributes, are those of the op's first case.

    Raises:
        ArgumentError: There is no such op or device, the op has no such axis, or a size is not an integer.
    """
    if isinstance(device, str):
        device = find_device(device)
    elif not isinstance(device, Device):
        raise ArgumentError(f"supports: device is {type(device).__name__}, expected a Device or a part of its name")
    axes = {axis: Attr(axis, int, False, None).plain("supports", size) for axis, size in axes.items()}
    ops = registry()
    if op not in ops:
        raise ArgumentError(f"supports: op is {op!r}, expected one of {', '.join(ops)}")
    declared = ops[op]
    known = {name for tensor in declared.tensors.values() for name in tensor.names}
    if unknown := set(axes) - known:
        raise ArgumentError(f"supports: axis is {min(unknown)!r}, expected one of {', '.join(sorted(known))}")
    case = declared.cases[0]
    inputs = case.make(np.random.default_rng(0))
    specs = []
    for name, tensor in declared.tensors.items():
        array = inputs.get(name)
        if array is None:
            specs.append(None)
            continue
        shape = tuple(axes.get(axis, size) for axis, size in zip(tensor.names, array.shape, strict=True))
        specs.append(Spec(shape, array.dtype.name))
    attrs = declared.defaults | dict(case.attrs)
    try:
        plan_call(declared, tuple(specs), tuple(attrs.values()), device)
    except (ArgumentError, UnsupportedError) as error:
        return Support(False, str(error))
    problem = declared.bind(dict(zip(declared.tensors, specs, strict=True)), attrs)
    return Support(True, implementation="" if declared.steps else declared.choose(problem, device)[0].asked)
