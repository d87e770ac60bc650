"""Calls of several ops as one: the plan of an op that is composed of others."""

from collections.abc import Mapping
from typing import Any

from xmla.core.device import Device
from xmla.core.op import Op
from xmla.core.plan import Part, Plan, join
from xmla.core.problem import Problem, Whole
from xmla.core.spec import Spec


class Steps:
    """Ops called one after another as one call: the plan of a composed op.

    Args:
        called: For errors, the arguments of the whole from which a step's arguments are computed, if they are not the
            same.
        arrays: Those of the whole's that are not as it has them.
    """

    def __init__(
        self, whole: Problem, device: Device, called: Mapping[str, str] | None = None,
        arrays: Mapping[str, Spec] | None = None,
    ) -> None:  # fmt: skip
        self.whole = whole
        self.device = device
        self.called = called or {}
        self.arrays: dict[str, Spec] = {**whole.specs, **(arrays or {})}
        self.parts: list[Part] = []

    def call(self, op: Op, same: str, renamed: Mapping[str, str] | None = None, **attrs: Any) -> None:
        """Call `op` with the whole's arrays named in `same`, and `renamed[argument]` for arguments of other names.

        Its results become arrays of the whole. Optional arguments that the whole does not have are not given.
        """
        names = {name: name for name in same.split()} | dict(renamed or {})
        specs = {argument: self.arrays.get(name) for argument, name in names.items()}
        asked = self.whole.implementation if self.whole.implementation in op.choices else None
        owner = self.whole.op if self.whole.whole is None else self.whole.whole.op
        told = {argument: self.whole.called(name) for argument, name in {**names, **self.called}.items()}
        problem = op.bind(specs, op.Values(**attrs), asked, Whole(owner, told))
        self.add(Part(op.name, op.plan(problem, self.device), names | {name: name for name in op.outputs}))

    def add(self, part: Part) -> None:
        """Run `part` next."""
        self.parts.append(part)
        self.arrays |= {part.names[n]: spec for n, spec in part.plan.buffers.items() if n in part.names}

    def plan(self) -> Plan:
        return join(self.parts, tuple(self.whole.results))
