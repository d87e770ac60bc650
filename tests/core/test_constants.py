"""Every constant that a plan gives a kernel is read by that kernel, or stands here with the reason why not."""

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.op import plan_call
from xmla.core.plan import Constants, Launch
from xmla.core.registry import registry
from xmla.core.values import KNOWN_DEVICES, Spec

# Of several kernels that take the same constants.
UNREAD = {
    "indexer_scores_kernel": {"KEYS.FORMAT"},  # always 16-bit
}  # fmt: skip


def called(function: Any) -> Iterator[Any]:
    """The device functions that the source of one names, by themselves or as a module's."""
    source, names = inspect.getsource(function), function.__globals__
    for name, attribute in re.findall(r"\b([a-zA-Z_]\w*)(?:\.(\w+))?", source):
        value = names.get(name)
        for found in (value, getattr(value, attribute, None) if inspect.ismodule(value) else None):
            if isinstance(found, JITFunction | InterpretedFunction):
                yield found.fn


@cache
def read_by(kernel: Any) -> frozenset[str]:
    """The attributes in capitals that the source of a kernel, and of all that it calls, names."""
    functions, new = set(), {kernel.fn}
    while new:
        functions |= new
        new = {each for function in new for each in called(function)} - functions
    return frozenset(re.findall(r"\.([A-Z]\w*)", "\n".join(map(inspect.getsource, functions))))


def unread(constants: Constants, names: frozenset[str], prefix: str = "") -> Iterator[str]:
    """The fields that neither the names nor the properties among them read."""
    properties = dict(inspect.getmembers(type(constants), lambda member: isinstance(member, property)))
    while more := {
        name for each in names & properties.keys()
        for name in re.findall(r"\.([A-Z]\w*)", inspect.getsource(properties[each].fget))
    } - names:  # fmt: skip
        names |= more
    for field in fields(constants):
        value = getattr(constants, field.name)
        if field.name not in names:
            yield prefix + field.name
        elif isinstance(value, Constants):
            yield from unread(value, names, f"{prefix}{field.name}.")


def launches() -> Iterator[Launch]:
    """The launches of every case of every op, on every device, by every implementation that serves it."""
    for op in registry().values():
        for case in op.cases:
            specs = {name: Spec.of_numpy(array) for name, array in case.make(np.random.default_rng(0)).items()}
            for device in KNOWN_DEVICES:
                for implementation in (None, *op.choices):
                    with suppress(ArgumentError, UnsupportedError):
                        tensors = tuple(specs.get(name) for name in op.tensors)
                        plan, _ = plan_call(op, tensors, op.attributes(**case.attrs), device, implementation)
                        yield from plan.launches


def test_every_constant_is_read() -> None:
    """A field that only some of the kernels with it know is else one that the others ignore."""
    found: dict[str, set[str]] = {}
    count = 0
    for launch in launches():
        for constants in launch.constexprs.values():
            if isinstance(constants, Constants):
                count += 1
                found.setdefault(launch.kernel.__name__, set()).update(unread(constants, read_by(launch.kernel)))
    assert count > 5000
    assert {kernel: names for kernel, names in found.items() if names} == UNREAD
