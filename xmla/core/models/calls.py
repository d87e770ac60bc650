"""Calls of ops as specs, and the kernels that they launch."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xmla.core.compile import Specialization, begins_anywhere, specialize
from xmla.core.op import Calls, Form, Op, Sizes, kind_of, plan_call, sizes_of, trace_call
from xmla.core.plan import Plan, estimate
from xmla.core.registry import registry
from xmla.core.values import Attributes, Device, Families, Spec, Trace


@dataclass(frozen=True, slots=True)
class Call:
    """One op at given sizes: its arguments' specs by name, and its attributes.

    Attributes:
        alternative: A step may make it in the place of calls before it.
        unaligned: In some steps arrays begin on no multiple of 16 bytes, as where a step's others end.
    """

    op: str
    specs: Mapping[str, Spec]
    attrs: Mapping[str, Any]
    alternative: bool = False
    unaligned: bool = False

    @property
    def bound(self) -> tuple[Op, tuple[Spec | None, ...], Attributes]:
        """The op, its arguments in order and its attributes."""
        op = registry()[self.op]
        return op, tuple(self.specs.get(name) for name in op.tensors), op.attributes(**self.attrs)

    def plan(self, device: Device, implementation: str | None = None) -> Plan:
        return plan_call(*self.bound, device, implementation)[0]

    def specializations(self, device: Device) -> list[Specialization]:
        """The kernels that the call launches on `device`. Where its arguments begin does not change the plan."""
        plan = self.plan(device)
        return [specialize(launch, plan, placed) for placed in self.placed(self.specs) for launch in plan.active]

    def placed(self, specs: Mapping[str, Spec]) -> list[Mapping[str, Spec]]:
        """The arguments `specs`, and where the call says so the same that begin on no multiple of 16 bytes."""
        if not self.unaligned:
            return [specs]
        anywhere = [name for name, spec in specs.items() if begins_anywhere(name, spec)]
        return [specs, {**specs, **{n: replace(specs[n], alignment=specs[n].itemsize) for n in anywhere}}]

    def with_pages(self, pages: int) -> "Call":
        """The call with pools of `pages` pages."""
        tensors = registry()[self.op].tensors
        pools = {name: spec for name, spec in self.specs.items() if tensors[name].format is not None}
        pools = {name: replace(spec, shape=(pages, *spec.shape[1:])) for name, spec in pools.items()}
        return replace(self, specs={**self.specs, **pools})

    def of_parts_of_rows(self) -> "tuple[Call, ...]":
        """The call with latents and roped dims as parts of one row, if it writes latents."""
        if "latent" not in self.specs:
            return ()
        latent, rope = self.specs["latent"], self.specs["rope"]
        strides = latent.shape[1] + rope.shape[1], 1
        parts = {"latent": replace(latent, strides=strides), "rope": replace(rope, strides=strides)}
        return (replace(self, specs={**self.specs, **parts}),)

    def with_unaligned(self) -> "Call":
        """The call, and the same with arrays that begin on no multiple of 16 bytes."""
        return replace(self, unaligned=True)

    def estimate(self, device: Device, keys: float | None = None) -> float | None:
        """The least seconds by the roofline, with `keys` in every request, by default as many as fit."""
        op = registry()[self.op]
        problem = op.bind(self.specs, op.attributes(**self.attrs))
        return estimate(op.work(problem, keys), self.plan(device), device)


# What makes the calls of a step of some sizes.
Make = Callable[..., Iterable[Call]]


def specializations(calls: Iterable[Call], device: Device) -> list[Specialization]:
    """The kernels that these calls launch on `device`, each once, in order of first use."""
    return list(kernel_list(calls, device).listed)


def kernel_list(calls: Iterable[Call], device: Device) -> "KernelList":
    """The list of these calls on `device`."""
    kernels = KernelList(device)
    for call in calls:
        kernels.add(call)
    return kernels


@dataclass(slots=True, eq=False)
class Kind:
    """Calls that differ in sizes alone: those that were looked at, and what tells that one has another's kernels.

    Attributes:
        has_room: Whether they say how many bytes of workspace there are.
        families: The calls of each template, and the constants of kernels that are listed of them.
    """

    has_room: bool
    seen: set[Sizes] = field(default_factory=set)
    families: Families[tuple[Form, set[Sizes]]] = field(default_factory=Families)


class KernelList:
    """The kernels of calls on a device, each once, in order of first use.

    Of calls that differ in sizes alone, and give the answers on which the plan of the first of them depends, one is
    planned. Likewise a step's calls are made once: for other sizes theirs are arithmetic (core/op/template.py).

    Attributes:
        planned: The calls that were planned, each one for all with its answers.
    """

    def __init__(self, device: Device) -> None:
        self.device: Device = device
        self.listed: dict[Specialization, None] = {}
        self.planned: list[Calls] = []
        self._kinds: dict[Any, Kind] = {}
        self._steps: defaultdict[Make, Families[None]] = defaultdict(Families)

    def add(self, call: Call) -> None:
        kind, sizes = self._kind(call)
        self._list(kind, sizes, lambda: call)

    def add_step(self, make: Make, *sizes: int) -> None:
        """Add the calls that `make` makes of these sizes, as it makes those of others with equal answers."""
        for place, (kind, of_call) in enumerate(self._calls(make, sizes)):
            self._list(kind, of_call, lambda place=place: [*make(*sizes)][place])

    def add_between(self, make: Make, low: int, high: int, *sizes: int) -> None:
        """Add what is between two numbers of tokens or requests where a workspace's room gives them other kernels.

        From one on rows do not fit it, from others fewer of a row's parts; between two that are served alike there is
        none.
        """
        middle = (low + high) // 2
        if middle in (low, high) or self._of_room(make, low, *sizes) == self._of_room(make, high, *sizes):
            return
        self.add_step(make, middle, *sizes)
        self.add_between(make, low, middle, *sizes)
        self.add_between(make, middle, high, *sizes)

    def _of_room(self, make: Make, *sizes: int) -> list[Any]:
        """What tells a step's calls that say how many bytes of workspace there are from others."""
        calls = [(kind, of_call) for kind, of_call in self._calls(make, sizes) if kind.has_room]
        known = [kind.families.find(of_call) for kind, of_call in calls]
        return [family and (family[0], family[1][-1]) for family in known]

    def _calls(self, make: Make, sizes: tuple[int, ...]) -> list[tuple[Kind, Sizes]]:
        known = self._steps[make].find(sizes)
        if known is not None:
            return known[1]
        trace = Trace()
        function = trace.function([self._kind(call) for call in make(*map(trace.input, sizes))])
        self._steps[make].add(sizes, function, None)
        return function(*sizes)[1]

    def _kind(self, call: Call) -> tuple[Kind, Sizes]:
        op, specs, attrs = call.bound
        specs = tuple(map(without_dense_strides, specs))
        key = call.unaligned, *kind_of(op, specs, attrs)
        return self._kinds.setdefault(key, Kind("workspace_bytes" in call.attrs)), sizes_of(specs, attrs)

    def _list(self, kind: Kind, sizes: Sizes, call: Callable[[], Call]) -> None:
        """List the kernels of a call, unless one before it has them; `call` makes it where it is planned anew."""
        if sizes in kind.seen:
            return
        kind.seen.add(sizes)
        known = kind.families.find(sizes)
        if known is None:
            form = self._plan(call())
            branch = kind.families.add(sizes, form.calls.function, (form, set()))
            known = branch, branch.function(*sizes)[1]
        (form, listed), (*_, constants) = known[0].value, known[1]
        if constants not in listed:
            listed.add(constants)
            calls = form.of(sizes, constants)
            for kernel in (start.kernel for starts in calls.starts for start in starts):
                self.listed.setdefault(kernel)
            self.planned.append(calls)

    def _plan(self, call: Call) -> Form:
        """Plan a call, with its sizes as symbols."""
        op, specs, attrs = call.bound
        specs = tuple(map(without_dense_strides, specs))
        template = trace_call(op, specs, attrs, self.device, None)
        present = {name: spec for name, spec in zip(op.tensors, specs, strict=True) if spec is not None}
        return template.form(call.placed(present))


def without_dense_strides(spec: Spec | None) -> Spec | None:
    """The spec as that of a tensor, which says nothing of strides if it is dense."""
    return replace(spec, strides=None) if spec is not None and spec.strides is not None and spec.is_dense else spec
