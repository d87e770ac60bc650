"""Calls of several ops as one: the plan of an op that is composed of others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xmla.core.call import CalledAs, Problem
from xmla.core.op.op import Op
from xmla.core.plan import Fusion, Part, Plan, fuse, join, overlap_launches
from xmla.core.values import Device, Spec


def same_names(*arrays: str) -> dict[str, str]:
    """Arrays that a step's op calls as the composed op does."""
    return {name: name for name in arrays}


class Composition:
    """The call of a composed op, as calls of other ops one after another.

    Args:
        computed_from: For errors, the arguments of the composed op from which a step's arguments are computed, if they
            are not the same.
        arrays: The arguments that are others than the call's.
    """

    def __init__(
        self, problem: Problem, device: Device, computed_from: Mapping[str, str] | None = None,
        arrays: Mapping[str, Spec] | None = None,
    ) -> None:  # fmt: skip
        self.problem = problem
        self.device = device
        self.computed_from = computed_from or {}
        self.arrays: dict[str, Spec] = {**problem.specs, **(arrays or {})}
        self.parts: list[Part] = []
        self.written = {*problem.written}  # arrays that steps before the next one write

    def call(self, op: Op, arrays: Mapping[str, str], **attrs: Any) -> None:
        """Call `op`: its argument `a` is the array `arrays[a]` of the composed op, or not given if that has none.

        Its results become arrays of the composed op, of their own names.
        """
        specs = {argument: self.arrays.get(name) for argument, name in arrays.items()}
        asked = self.problem.implementation if self.problem.implementation in op.choices else None
        names = {argument: self.problem.called(name) for argument, name in {**arrays, **self.computed_from}.items()}
        problem = op.bind(specs, op.Values(**attrs), asked, CalledAs(self.problem.called_op, names))
        written = frozenset(argument for argument, name in arrays.items() if name in self.written)
        plan = op.plan(replace(problem, written=written), self.device)
        updates = frozenset(arrays[argument] for argument in op.mutates)
        self.add(Part(op.name, plan, {**arrays, **same_names(*op.outputs)}, updates))

    def add(self, part: Part) -> None:
        """Run `part` next."""
        self.parts.append(part)
        results = {part.names[n]: spec for n, spec in part.plan.buffers.items() if n in part.names}
        self.arrays |= results
        self.written |= results.keys() | part.updates

    def plan(self, fusions: Sequence[Fusion] = ()) -> Plan:
        """The plan of the steps, in which `fusions` make one launch of two, and launches that spread start early."""
        plan = join(self.parts, tuple(self.problem.results))
        return replace(plan, launches=overlap_launches(fuse(plan.launches, fusions)))
