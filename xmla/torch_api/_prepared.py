"""Calls that are prepared once, by families that differ in sizes alone, and how a call like an earlier one is found."""

import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations
from typing import Any

import torch
from torch.fx.proxy import TraceError
from triton.compiler import CompiledKernel

from xmla.core.compile import as_compiled, compiled, exec_function, specialize
from xmla.core.errors import ArgumentError
from xmla.core.op import Op, Sizes, Template, plan_call, trace_call
from xmla.core.plan import Launch, Plan
from xmla.core.values import Attributes, Device, Spec, alignment_of, row_major
from xmla.torch_api import _memory, _private
from xmla.torch_api._arrays import NAMES, device_of, spec_of, strides_of
from xmla.torch_api._checks import Tensors, by_name, check_devices, check_fork, check_memory, check_tensors
from xmla.torch_api._launch import (
    batch_launcher,
    bind_launch,
    describe_launches,
    load,
    sequential_launcher,
)


@dataclass(slots=True, eq=False)
class Family:
    """Calls that differ in sizes alone, as far as they have one template: what is made of it once.

    The template is not kept. A full collection of garbage would look at its objects, of thousands after a warm-up.

    Attributes:
        implementation: That the calls ask for.
        calls: Of the sizes of a call its results and `distances`, as `Prepared` has them, the bytes of its workspace,
            and what `batch_launcher` takes, or None if that does not serve the kernels; None of a call of another
            template.
        pairs: Which of a call's `_memory.spaces` have to lie apart.
        disjoint: What tells it of so many addresses, made by `_memory.disjoint_check`.
        in_turn: What starts the kernels one after the other, and the numbers that it takes, of a call's sizes. None
            until it is needed, and on the CPU.
        plan_of: The plan of a call's sizes, which the interpreter runs. None on a GPU.
    """

    op: Op
    implementation: str | None
    ordinal: int  # −1 on the CPU
    calls: Callable[..., tuple[Any, ...] | None]
    pairs: tuple[_memory.Pair, ...]
    disjoint: dict[int, Callable[..., bool]]
    in_turn: tuple[Callable[..., None], Callable[..., tuple[int, ...]]] | None
    plan_of: Callable[..., Plan] | None

    def call_of(self, sizes: Sizes, attrs: tuple[Any, ...]) -> "Prepared | None":
        """The call of these sizes and attributes, if it is of the template."""
        numbers = self.calls(*sizes)
        if numbers is None:
            return None
        results, distances, workspace_bytes, launches = numbers
        launch_all = None if launches is None else batch_launcher(self.ordinal, launches)
        return Prepared(
            self, sizes, tuple(attrs), results, distances, workspace_bytes, self.ordinal, launch_all, self.op.mutated
        )


@dataclass(slots=True, eq=False)
class Prepared:
    """A call of certain sizes, of which as little is kept as makes the next one fast: there are many sizes.

    Attributes:
        sizes: As `core.op.template.sizes_of` has them.
        results: Shape, strides and dtype of each.
        distances: What the family's `disjoint` takes.
        launch_all: Starts the kernels where no profiler looks on, faster than the family's `in_turn`; or None.
        mutated: The op's.
        numbers: What the family's `in_turn` takes, once it is called.
        plan: What the interpreter runs, once it has.
        same_out: Compares `out` with what was accepted before.
        same_workspace: Compares `workspace` with what was accepted before.
    """

    family: Family
    sizes: Sizes
    attrs: tuple[Any, ...]
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    distances: tuple[int, ...]
    workspace_bytes: int
    ordinal: int
    launch_all: Callable[..., None] | None
    mutated: tuple[int, ...]
    numbers: tuple[int, ...] | None = None
    plan: Plan | None = None
    same_out: Callable[..., bool] | None = None
    same_workspace: Callable[..., bool] | None = None

    @property
    def result_specs(self) -> list[Spec]:
        return [Spec(shape, NAMES[dtype]) for shape, _, dtype in self.results]


def plan_tensors(
    op: Op, tensors: Tensors, attrs: Attributes, device: Device | None = None, implementation: str | None = None
) -> tuple[Plan, tuple[Spec, ...], dict[str, Spec | None]]:
    """The plan of a call on `device` (default: the tensors' device), the specs of its results and those of its
    arguments, after every check.
    """
    check_tensors(op, tensors)
    if device is None:
        check_devices(op, tensors)
    specs = specs_of(op, tensors)
    call = plan_call(op, tuple(specs.values()), attrs, device or device_of(tensors[0].device), implementation)
    return *call, specs


def specs_of(op: Op, tensors: Tensors) -> dict[str, Spec | None]:
    op.check_devices({n: str(t.device) for n, t in zip(op.tensors, tensors, strict=True) if t is not None})
    return {name: None if t is None else spec_of(t) for name, t in zip(op.tensors, tensors, strict=True)}


def present_specs(op: Op, tensors: Tensors) -> dict[str, Spec]:
    """Specs of the arguments that are given."""
    return {name: spec for name, spec in specs_of(op, tensors).items() if spec is not None}


# The pointers of (tensors, attrs, implementation) if it is a certain call, else None.
Match = Callable[[Tensors, tuple[Any, ...], str | None], list[int] | None]


class CallCache:
    """The prepared calls of this process: by everything that they depend on, and the last ones of each op.

    A call of new sizes is of a family of calls that differ from it in sizes alone, if there has been one. Of many calls
    and families the ones stay that came last: a server's prompts have sizes that seldom come again, and a full
    collection of garbage looks at some objects of each.

    Threads share them without a lock, for which a signal handler, or a forked process, could wait for ever: each step
    is one method of a container, which no other thread interrupts.
    """

    MOST = 1 << 11
    RECENT = 8  # a model's layers differ in a few ways
    MOST_KINDS = 1 << 9
    FAMILIES = 1 << 7  # of a kind, whose tensors differ in sizes alone: a step of ever new sizes meets some 50

    def __init__(self) -> None:
        self.prepared: OrderedDict[Any, Prepared] = OrderedDict()
        self.families: OrderedDict[Any, tuple[Family, ...]] = OrderedDict()
        self.ahead: dict[Any, list[Family]] = {}  # of warm-up, which stay
        self.recent: dict[Op, tuple[tuple[Match, Prepared], ...]] = defaultdict(tuple)

    def find(self, key: Any) -> Prepared | None:
        return _newest(self.prepared, key)

    def add(self, key: Any, prepared: Prepared) -> None:
        _add(self.prepared, key, prepared, self.MOST)

    def find_of_kind(self, kind: Any, sizes: Sizes, attrs: tuple[Any, ...]) -> Prepared | None:
        """The call of these sizes, if it is of a family that is kept."""
        families = _newest(self.families, kind) or ()
        for place, family in enumerate(families):
            prepared = family.call_of(sizes, attrs)
            if prepared is not None:
                if place:
                    self.families[kind] = family, *families[:place], *families[place + 1 :]
                return prepared
        for family in self.ahead.get(kind, ()):
            prepared = family.call_of(sizes, attrs)
            if prepared is not None:
                self.add_family(kind, family)
                return prepared
        return None

    def add_family(self, kind: Any, family: Family) -> None:
        families = family, *self.families.get(kind, ())[: self.FAMILIES - 1]
        _add(self.families, kind, families, self.MOST_KINDS)

    def clear(self) -> None:
        self.prepared.clear()
        self.families.clear()
        self.ahead.clear()
        self.recent.clear()


def _newest[T](entries: OrderedDict[Any, T], key: Any) -> T | None:
    """The entry, which is from now on the newest one."""
    entry = entries.get(key)
    if entry is not None:
        with suppress(KeyError):  # another thread has dropped it
            entries.move_to_end(key)
    return entry


def _add[T](entries: OrderedDict[Any, T], key: Any, entry: T, most: int) -> None:
    entries[key] = entry
    while len(entries) > most:
        entries.popitem(last=False)


call_cache = CallCache()
os.register_at_fork(after_in_child=call_cache.clear)  # so that a forked process calls `prepare`, which refuses it


def recall(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], implementation: str | None
) -> tuple[Prepared, list[int]] | None:
    """The prepared call and the pointers of a call like one of the last, without modes and transformations around it.

    None where a gradient may be recorded, a pointer is not a multiple of 16, or another GPU is current.
    """
    try:
        for match, prepared in call_cache.recent[op]:
            pointers = match(tensors, attrs, implementation)
            if pointers is not None:
                return prepared, pointers
    except (AttributeError, TraceError):  # an argument is no tensor, or a symbolic one of torch.fx
        return None
    return None


def remember(op: Op, tensors: Tensors, attrs: tuple[Any, ...], implementation: str | None, prepared: Prepared) -> None:
    """Let `recall` find a call, if it can: its tensors are plain, without a gradient, and start on 16 bytes."""
    present = [tensor for tensor in tensors if tensor is not None]
    if all(type(t) is torch.Tensor and not t.requires_grad and t.data_ptr() % 16 == 0 for t in present):
        same = _private.comparison(present)
        if same is not None:
            match = matcher(op, tensors, attrs, implementation, same)
            call_cache.recent[op] = ((match, prepared), *call_cache.recent[op][: CallCache.RECENT - 1])


def matcher(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], implementation: str | None, same: Callable[..., bool]
) -> Match:
    """The function that tells a call that was made before, in a fraction of the time that its key takes.

    `same` compares dtypes, shapes, strides, devices and dispatch keys of the given tensors with those of that call.
    """
    present = by_name(op, tensors)
    filled = tuple(name for name, tensor in present.items() if tensor.numel())
    named = (*zip(op.defaults, attrs, strict=True), ("implementation", implementation))
    ordinal = tensors[0].get_device()  # −1 on the CPU
    literals = tuple(str(value) if value is None or isinstance(value, bool) else "" for _, value in named)
    scope = {"same": same, "current_device": _private.current_device, "ordinal": ordinal}
    for name, value in named:
        scope |= {f"{name}_value": value, f"{name}_type": type(value)}
    return _match(tuple(op.tensors), tuple(present), filled, tuple(op.defaults), literals, ordinal >= 0)(**scope)


@cache
def _match(
    tensors: tuple[str, ...], present: tuple[str, ...], filled: tuple[str, ...], attrs: tuple[str, ...],
    literals: tuple[str, ...], on_gpu: bool,
) -> Callable[..., Match]:  # fmt: skip
    """What makes a `Match` of the values that it compares with: text is executed once, not for each call of a new size.

    A loop over arguments costs more than all comparisons. For an op of few arguments the `Match` reads

    def match(tensors, attrs, implementation):
        q, slots, lengths, = tensors
        scale, compact, = attrs
        if (lengths is None and type(scale) is scale_type and scale == scale_value and compact is False
                and implementation is None and not (q.is_nested or slots.is_nested) and same(q, slots)
                and current_device() == ordinal):
            q, slots, = q.data_ptr(), slots.data_ptr(),
            if q and slots and not (q % 16 or slots % 16):
                return [q, slots, ]

    `same` asks a tensor for its strides, at which a nested one ends the process. The address of a storage that was
    freed is 0; `filled` are tensors that have elements.
    """
    tests = [f"{name} is None" for name in tensors if name not in present]
    named = *attrs, "implementation"
    for name, literal in zip(named, literals, strict=True):  # True is not 1, nor is 1.0
        tests.append(f"{name} is {literal}" if literal else f"type({name}) is {name}_type and {name} == {name}_value")
    tests.append(f"not ({' or '.join(f'{name}.is_nested' for name in present)})")
    tests += [f"same({', '.join(present)})", *["current_device() == ordinal"] * on_gpu]

    def each(names: tuple[str, ...], form: str = "{}, ") -> str:
        return "".join(form.format(name) for name in names)

    values = ["same", "current_device", "ordinal", *(f"{name}_{of}" for name in named for of in ("value", "type"))]
    text = f"""def matching({", ".join(values)}):
    def match(tensors, attrs, implementation):
        {each(tensors)} = tensors
        {each(attrs) or "()"} = attrs
        if {" and ".join(tests)}:
            {each(present)} = {each(present, "{}.data_ptr(), ")}
            if {each(filled, "{} and ")}not ({" or ".join(f"{name} % 16" for name in present)}):
                return [{each(present)}]
    return match"""
    return exec_function(text, "matching")


def prepare(op: Op, tensors: Tensors, attrs: Attributes, implementation: str | None) -> Prepared:
    """The first call with given shapes, of a family that is kept or of a new one."""
    if tensors[0].is_cuda:
        check_fork(op)
    check_tensors(op, tensors)
    kind, sizes = kind_of(op, tensors, attrs, implementation)
    prepared = call_cache.find_of_kind(kind, sizes, attrs)
    if prepared is not None:
        return prepared
    family = make_family(op, tensors, attrs, implementation)
    call_cache.add_family(kind, family)
    return family.call_of(sizes, attrs)  # pyrefly: ignore


def kind_of(op: Op, tensors: Tensors, attrs: Attributes, implementation: str | None) -> tuple[tuple[Any, ...], Sizes]:
    """What a call depends on besides sizes, and these, as `core.op.template.sizes_of` has them."""
    kind: list[Any] = [op, implementation]
    sizes: list[int] = []
    alignments: list[int] = []
    for tensor in tensors:
        if tensor is None:
            kind.append(None)
        else:
            shape, address = tensor.shape, tensor.data_ptr()
            strides = strides_of(tensor)
            kind += (len(shape), tensor.dtype, tensor.device, address != 0 or 0 in shape, strides is None)
            alignments.append(alignment_of(address))
            sizes += shape
            if strides is not None:
                sizes += strides
    if min(alignments) < 16:
        alignments = [spec.alignment for spec in as_compiled(present_specs(op, tensors)).values()]
    for value in attrs:
        if type(value) is int:
            kind.append(int)
            sizes.append(value)
        else:
            kind.append(value)
    return (*kind, *alignments), tuple(sizes)


def kind_of_specs(op: Op, specs: Mapping[str, Spec], attrs: Attributes, device: torch.device) -> tuple[Any, ...]:
    """The kind of calls on tensors with these specs."""
    kind: list[Any] = [op, None]
    for name in op.tensors:
        if name in specs:
            spec = specs[name]
            kind += (len(spec.shape), getattr(torch, spec.dtype), device, True, spec.strides is None)
        else:
            kind.append(None)
    kind += (int if type(value) is int else value for value in attrs)
    return *kind, *(specs[name].alignment for name in op.tensors if name in specs)


def make_family(op: Op, tensors: Tensors, attrs: Attributes, implementation: str | None) -> Family:
    """Check, plan and compile a call, and all that differ from it in sizes alone."""
    check_devices(op, tensors)
    specs = as_compiled(present_specs(op, tensors))
    template = trace(op, specs, attrs, tensors[0].device, implementation)
    check_memory(op, by_name(op, tensors))
    (family,) = families_of(op, template, [specs], implementation, tensors[0].device)
    return family


def plan_ahead(op: Op, places: Sequence[Mapping[str, Spec]], attrs: Attributes, device: torch.device) -> None:
    """Plan and compile calls on tensors with specs that differ in sizes alone, at each of some places in memory."""
    places = [{n: replace(spec, strides=None) if spec.is_dense else spec for n, spec in at.items()} for at in places]
    families = families_of(op, trace(op, places[0], attrs, device, None), places, None, device)
    for specs, family in zip(places, families, strict=True):
        kind = kind_of_specs(op, specs, attrs, device)
        if kind not in call_cache.ahead:
            call_cache.ahead[kind] = []
            for alike in _naming_fewer_formats(op, specs, attrs):
                call_cache.ahead.setdefault(kind_of_specs(op, specs, alike, device), call_cache.ahead[kind])
        call_cache.ahead[kind].append(family)


def _naming_fewer_formats(op: Op, specs: Mapping[str, Spec], attrs: Attributes) -> Iterator[Attributes]:
    """The attributes without some names of formats that the caches tell, too."""
    formats = op.bind(specs, attrs).formats
    names = [t.format_attribute for t in op.tensors.values() if getattr(attrs, t.format_attribute or "_", None)]
    for chosen in chain.from_iterable(combinations(names, count) for count in range(1, len(names) + 1)):
        fewer = attrs._replace(**dict.fromkeys(chosen))
        with suppress(ArgumentError):  # several formats have such rows
            if op.bind(specs, fewer).formats == formats:
                yield fewer


def trace(
    op: Op, specs: Mapping[str, Spec], attrs: Attributes, device: torch.device, implementation: str | None
) -> Template:
    return trace_call(op, tuple(map(specs.get, op.tensors)), attrs, device_of(device), implementation)


def families_of(
    op: Op, template: Template, places: Sequence[Mapping[str, Spec]], implementation: str | None, device: torch.device
) -> list[Family]:
    """The calls of a template on arguments that begin where those of `places` do, with their kernels compiled."""
    arguments = {name: spec for name, spec in zip(op.tensors, template.specs, strict=True) if spec is not None}
    pairs, distances = _memory.distances(op, _memory.spaces(op, arguments, template.results, template.workspace_bytes))
    results = tuple((spec.shape, row_major(spec.shape), getattr(torch, spec.dtype)) for spec in template.results)
    on_gpu = device.type == "cuda"
    kernels = [loaded(template, arguments, specs, device) if on_gpu else [] for specs in places]
    families = []
    for each in kernels:  # all of which are known here: a function ends the trace
        launches = describe_launches(each, *arrays_of(template, arguments)) if on_gpu else None
        calls = template.trace.function((results, distances, template.workspace_bytes, launches))
        in_turn = launches_in_turn(template, arguments, each) if on_gpu and launches is None else None
        plan_of = None if on_gpu else template.at(template.plan)
        ordinal = device.index if on_gpu else -1
        families.append(Family(op, implementation, ordinal, calls, pairs, _checks(pairs), in_turn, plan_of))
    return families


@cache
def _checks(pairs: tuple[_memory.Pair, ...]) -> dict[int, Callable[..., bool]]:
    """`Family.disjoint` of all families with these pairs."""
    return {}


# A kernel that is loaded, its launch, and whether it may start before the launch before it has ended.
Loaded = tuple[CompiledKernel, Launch, bool]


def loaded(
    template: Template, arguments: Mapping[str, Spec], places: Mapping[str, Spec], device: torch.device
) -> list[Loaded]:
    """A template's kernels, for arguments that begin where those of `places` do."""
    specs = {name: replace(spec, alignment=places[name].alignment) for name, spec in arguments.items()}
    kernels = []
    for launch in template.active:
        kernel = compiled(specialize(launch, template.plan, specs), device_of(device).arch, device.index)
        kernels.append((load(kernel), launch, launch.waits and bool(kernels)))
    return kernels


def arrays_of(template: Template, arguments: Mapping[str, Spec]) -> tuple[list[str], tuple[str, ...], dict[str, int]]:
    """What `describe_launches` and `sequential_launcher` know arrays by."""
    return [*arguments], template.plan.results, template.workspace


def launches_in_turn(
    template: Template, arguments: Mapping[str, Spec], kernels: Sequence[Loaded]
) -> tuple[Callable[..., None], Callable[..., tuple[int, ...]]]:
    """`Family.in_turn`."""
    starters = [
        (bind_launch(kernel, tuple(value for _, value in launch.constexpr_values), early), launch)
        for kernel, launch, early in kernels
    ]
    launch_each, numbers = sequential_launcher(starters, *arrays_of(template, arguments))
    return launch_each, template.trace.function(numbers)
