"""Calls that are prepared once, by families that differ in sizes alone, and how a call like an earlier one is found."""

import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations
from typing import Any

import torch
from torch.fx.proxy import TraceError
from triton.compiler import CompiledKernel

from xmla.core.compile import as_compiled, compiled, exec_function
from xmla.core.errors import ArgumentError
from xmla.core.op import Calls, Op, Pair, Sizes, Start, plan_call, trace_call
from xmla.core.plan import Plan
from xmla.core.values import Attributes, Device, Families, Spec
from xmla.torch_api import _private
from xmla.torch_api._arrays import NAMES, device_of, spec_of
from xmla.torch_api._checks import Tensors, by_name, check_devices, check_fork, check_memory, check_tensors
from xmla.torch_api._launch import batch_launcher, load


@dataclass(slots=True, eq=False)
class Family:
    """Calls that differ in sizes alone, as far as they have one template and kernels: what is made of these once.

    Attributes:
        dtypes: Those of the results.
        pairs: Which of a call's `spaces` have to lie apart.
        disjoint: What tells it of so many addresses, made by `disjoint_check`.
        kernels: What `batch_launcher` gives for the launches. None where it does not serve them, and on the CPU.
        in_turn: What starts the kernels one after the other. None until it is needed, and on the CPU.
        starts: The launches.
        plan_of: The plan of a call's sizes, which the interpreter runs. None on a GPU.
    """

    op: Op
    ordinal: int  # −1 on the CPU
    dtypes: tuple[torch.dtype, ...]
    pairs: tuple[Pair, ...]
    disjoint: dict[int, Callable[..., bool]]
    starts: tuple[Start, ...]
    kernels: Callable[[tuple[int, ...]], Callable[..., None]] | None
    plan_of: Callable[..., Plan] | None
    in_turn: Callable[..., None] | None = None


@dataclass(slots=True, eq=False)
class Prepared:
    """A call of certain sizes, of which as little is kept as makes the next one fast: there are many sizes.

    Attributes:
        sizes: As `core.op.template.sizes_of` has them.
        results: Shape, strides and dtype of each.
        distances: What the family's `disjoint` takes.
        launch_all: Starts the kernels where no profiler looks on, faster than the family's `in_turn`; or None.
        mutated: The op's.
        numbers: What the family's `in_turn` takes.
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
    numbers: tuple[int, ...]
    plan: Plan | None = None
    same_out: Callable[..., bool] | None = None
    same_workspace: Callable[..., bool] | None = None

    @classmethod
    def of(cls, family: Family, sizes: Sizes, attrs: tuple[Any, ...], call: tuple[Any, ...]) -> "Prepared":
        """The call with what a template's function gives for its sizes."""
        results, distances, workspace_bytes, numbers, _ = call
        pairs = zip(results, family.dtypes, strict=True)
        results = tuple([(shape, strides, dtype) for (shape, strides), dtype in pairs])
        launch_all = None if family.kernels is None else family.kernels(numbers)
        return cls(
            family, sizes, attrs, results, distances, workspace_bytes, family.ordinal, launch_all, family.op.mutated,
            numbers,
        )  # fmt: skip

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


# Of one template, by the constants of their kernels.
ByConstants = dict[Sizes, Family]


class Kind:
    """Calls that differ in sizes alone, and what is known of them.

    Attributes:
        ahead: The families that warm-up has planned.
        families: Those of other calls: as many as are kept, then again from none.
        count: How many these are.
    """

    __slots__ = ("ahead", "count", "families")

    def __init__(self) -> None:
        self.ahead: Families[ByConstants] = Families()
        self.families: Families[ByConstants] = Families()
        self.count = 0

    def prepared(self, sizes: Sizes, attrs: tuple[Any, ...]) -> Prepared | None:
        """The call of these sizes, if it is of a family that is kept."""
        for families in (self.ahead, self.families):
            known = families.find(sizes)
            if known is not None:
                branch, call = known
                family = branch.value.get(call[-1])
                if family is not None:
                    return Prepared.of(family, sizes, attrs, call)
        return None

    def add(self, calls: Calls, family: Family) -> None:
        if self.count >= CallCache.FAMILIES:
            self.families, self.count = Families(), 0
        _add_family(self.families, calls, family)
        self.count += 1


def _add_family(families: Families[ByConstants], calls: Calls, family: Family) -> None:
    """Keep a family, unless there is one of these calls. Threads may add at once."""
    families.add(calls.sizes, calls.function, {}).value.setdefault(calls.constants, family)


# The pointers of (tensors, attrs, implementation) if it is a certain call, else None.
Match = Callable[[Tensors, tuple[Any, ...], str | None], list[int] | None]


class CallCache:
    """The prepared calls of this process: by everything that they depend on, and the last ones of each op.

    A call of new sizes is of a family of calls that differ from it in sizes alone, if there has been one. Of many calls
    the ones stay that came last, of kinds the newest: a server's prompts have sizes that seldom come again, and a full
    collection of garbage looks at some objects of each.

    Threads share them without a lock, for which a signal handler, or a forked process, could wait for ever: each step
    is one method of a container, which no other thread interrupts.
    """

    MOST = 1 << 11
    RECENT = 8  # a model's layers differ in a few ways
    MOST_KINDS = 1 << 9
    FAMILIES = 1 << 7  # of a kind, whose tensors differ in sizes alone: a step of ever new sizes meets some 50

    def __init__(self) -> None:
        self.prepared: OrderedDict[tuple[Kind, Sizes], Prepared] = OrderedDict()
        self.kinds: OrderedDict[tuple[Any, ...], Kind] = OrderedDict()
        self.ahead: dict[tuple[Any, ...], Kind] = {}  # of warm-up, which stay
        self.recent: dict[Op, tuple[tuple[Match, Prepared], ...]] = defaultdict(tuple)

    def kind(self, depends_on: tuple[Any, ...]) -> Kind:
        kind = self.ahead.get(depends_on) or self.kinds.get(depends_on)
        if kind is None:
            kind = Kind()
            _add(self.kinds, depends_on, kind, self.MOST_KINDS)
        return kind

    def find(self, kind: Kind, sizes: Sizes) -> Prepared | None:
        return _newest(self.prepared, (kind, sizes))

    def add(self, kind: Kind, sizes: Sizes, prepared: Prepared) -> None:
        _add(self.prepared, (kind, sizes), prepared, self.MOST)

    def clear(self) -> None:
        self.prepared.clear()
        self.kinds.clear()
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


def read(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], implementation: str | None
) -> tuple[tuple[Any, ...], Sizes, list[int]]:
    """What a call depends on besides sizes, which is its kind, these as `core.op.template.sizes_of` has them, and its
    pointers.

    It is one loop, since it runs before launches.
    """
    kind: list[Any] = [op, implementation]
    sizes: list[int] = []
    pointers: list[int] = []
    places = 0
    for tensor in tensors:
        if tensor is None:
            kind.append(None)
            continue
        shape, address = tensor.shape, tensor.data_ptr()
        pointers.append(address)
        places |= address
        sizes += shape
        if tensor.is_contiguous():
            rank = len(shape)
        else:
            rank = -len(shape)
            sizes += tensor.stride()
        # One without an address has no elements, or no memory and is refused; −1 is a meta tensor's ordinal too.
        somewhere = address or (0 in shape and not tensor.is_meta)
        kind += (rank, tensor.dtype, tensor.get_device() if somewhere else tensor.device)
    kind += map(type, attrs)  # True is not 1
    for value in attrs:
        if type(value) is int:
            sizes.append(value)
        else:
            kind.append(value)
    if places % 16:
        kind += (spec.alignment for spec in as_compiled(present_specs(op, tensors)).values())
    return tuple(kind), tuple(sizes), pointers


def kind_of_specs(op: Op, specs: Mapping[str, Spec], attrs: Attributes, ordinal: int) -> tuple[Any, ...]:
    """The kind of calls on tensors with these specs, on the GPU of this number."""
    kind: list[Any] = [op, None]
    for name in op.tensors:
        if name in specs:
            spec = specs[name]
            rank = len(spec.shape)
            kind += (rank if spec.strides is None else -rank, getattr(torch, spec.dtype), ordinal)
        else:
            kind.append(None)
    kind += map(type, attrs)
    kind += (value for value in attrs if type(value) is not int)
    alignments = [specs[name].alignment for name in op.tensors if name in specs]
    return *kind, *(alignments if min(alignments) < 16 else ())


def prepare(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], implementation: str | None, kind: Kind, sizes: Sizes
) -> Prepared:
    """The first call with given sizes, of a family that is kept or of a new one."""
    prepared = kind.prepared(sizes, attrs)
    if prepared is not None:
        return prepared
    checked = op.attributes(*attrs)
    if [*map(type, checked)] != [*map(type, attrs)]:
        depends_on, sizes, _ = read(op, tensors, checked, implementation)
        return prepare(op, tensors, checked, implementation, call_cache.kind(depends_on), sizes)
    calls, family = make_family(op, tensors, checked, implementation)
    kind.add(calls, family)
    return Prepared.of(family, sizes, attrs, calls.function(*sizes)[1])


def make_family(op: Op, tensors: Tensors, attrs: Attributes, implementation: str | None) -> tuple[Calls, Family]:
    """Check, plan and compile a call, and with it all that differ from it in sizes alone."""
    if tensors[0].is_cuda:
        check_fork(op)
    check_tensors(op, tensors)
    check_devices(op, tensors)
    specs, device = as_compiled(present_specs(op, tensors)), tensors[0].device
    template = trace_call(op, tuple(map(specs.get, op.tensors)), attrs, device_of(device), implementation)
    check_memory(op, by_name(op, tensors))
    calls = template.calls([specs])
    plan_of = None if device.type == "cuda" else template.at(template.plan)
    return calls, family_of(calls, calls.starts[0], device, plan_of)


def plan_ahead(calls: Calls, device: torch.device) -> None:
    """Make ready, at each of their places, all calls that differ in sizes alone from one that warm-up has planned.

    Threads may plan at once. Nothing is kept of a family that an earlier warm-up, or another thread, has planned.
    """
    op, attrs, ordinal = calls.op, calls.attrs, ordinal_of(device)
    for specs, starts in zip(calls.places, calls.starts, strict=True):
        depends_on = kind_of_specs(op, specs, attrs, ordinal)
        kind = call_cache.ahead.get(depends_on)
        if kind is None:
            kind = call_cache.ahead.setdefault(depends_on, Kind())
            for alike in _naming_fewer_formats(op, specs, attrs):
                call_cache.ahead.setdefault(kind_of_specs(op, specs, alike, ordinal), kind)
        _add_family(kind.ahead, calls, family_of(calls, starts, device))


def _naming_fewer_formats(op: Op, specs: Mapping[str, Spec], attrs: Attributes) -> Iterator[Attributes]:
    """The attributes without some names of formats that the caches tell, too."""
    formats = op.bind(specs, attrs).formats
    names = [t.format_attribute for t in op.tensors.values() if getattr(attrs, t.format_attribute or "_", None)]
    for chosen in chain.from_iterable(combinations(names, count) for count in range(1, len(names) + 1)):
        fewer = attrs._replace(**dict.fromkeys(chosen))
        with suppress(ArgumentError):  # several formats have such rows
            if op.bind(specs, fewer).formats == formats:
                yield fewer


def ordinal_of(device: torch.device) -> int:
    return device.index if device.type == "cuda" else -1


def family_of(
    calls: Calls, starts: tuple[Start, ...], device: torch.device, plan_of: Callable[..., Plan] | None = None
) -> Family:
    """Calls of a template at one of its places, with their kernels compiled and loaded."""
    ordinal = ordinal_of(device)
    kernels = None if ordinal < 0 else batch_launcher(ordinal, loaded(starts, device))
    dtypes = tuple(getattr(torch, dtype) for dtype in calls.dtypes)
    return Family(calls.op, ordinal, dtypes, calls.pairs, _checks(calls.pairs), starts, kernels, plan_of)


@cache
def _checks(pairs: tuple[Pair, ...]) -> dict[int, Callable[..., bool]]:
    """`Family.disjoint` of all families with these pairs."""
    return {}


def loaded(starts: Sequence[Start], device: torch.device) -> list[tuple[CompiledKernel, Start]]:
    """Launches by their kernels."""
    return [(load(compiled(start.kernel, device_of(device).arch, device.index)), start) for start in starts]
