"""Plans of calls that differ in sizes alone: one is made with its sizes as symbols, the others are arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap, zip_longest
from typing import Any

from xmla.core.call import GROWING
from xmla.core.compile import Specialization, specialize
from xmla.core.op.memo import make_plan
from xmla.core.op.memory import Pair, distances, spaces
from xmla.core.op.op import Op
from xmla.core.plan import Launch, Plan
from xmla.core.values import Attributes, Device, Size, Spec, Trace, row_major, sizes_in, with_numbers

Specs = tuple[Spec | None, ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A launch of all calls of a template: what differs between these is among a call's numbers.

    Attributes:
        early: It may start before the launch before it has ended.
        programs: The place of their number.
        arguments: Of each the place of its array among a call's arguments, results and workspace, and the place of the
            number of bytes from there on; −1 where there are none. A size is a number without an array.
    """

    kernel: Specialization
    early: bool
    programs: int
    arguments: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Calls of a template whose kernels are the same, in few objects: a full collection looks at those of thousands.

    Attributes:
        places: The arguments of the call that was traced, at each place in memory where they may begin.
        attrs: Its attributes.
        sizes: Those of one of the calls, in the order of `sizes_of`.
        function: What gives of a call's sizes, as `Trace.function`, all that it needs: shape and strides of each
            result, what `disjoint_check` takes, the bytes of the workspace, the numbers of `starts`, which are where
            buffers of the workspace begin, then programs and sizes of each launch; and `constants`.
        dtypes: Those of the results.
        pairs: Which memory has to lie apart.
        constants: What the kernels of these calls are compiled for, where calls of the template differ in it.
        starts: The launches, for the arguments at each of `places`.
    """

    op: Op
    places: Sequence[Mapping[str, Spec]]
    attrs: Attributes
    sizes: Sizes
    function: Callable[..., tuple[Any, Any]]
    dtypes: tuple[str, ...]
    pairs: tuple[Pair, ...]
    constants: Sizes
    starts: tuple[tuple[Start, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """All calls of a template: what they have alike as `Calls` say, and kernels whose constants may be sizes.

    Attributes:
        constants: The sizes among these constants.
        places: Of each kernel, by its identity, the places of its own among them.
        kernels: Kernels with numbers in the place of their own constants, by their identity and these numbers.
    """

    calls: Calls
    constants: tuple[Size, ...]
    places: Mapping[int, tuple[int, ...]]
    kernels: dict[tuple[int, Sizes], Specialization] = field(default_factory=dict)

    def of(self, sizes: Sizes, constants: Sizes) -> Calls:
        """The calls whose kernels have these constants, as that of `sizes` has."""
        numbers = {id(size): number for size, number in zip(self.constants, constants, strict=True)}

        def with_numbers_in(start: Start) -> Start:
            key = id(start.kernel), tuple([constants[place] for place in self.places[id(start.kernel)]])
            kernel = self.kernels.get(key)
            if kernel is None:
                kernel = with_numbers(start.kernel, lambda size: numbers.get(id(size), size.value))
                self.kernels[key] = kernel
            return Start(kernel, start.early, start.programs, start.arguments)

        starts = tuple([tuple(map(with_numbers_in, each)) for each in self.calls.starts])
        return replace(self.calls, sizes=sizes, constants=constants, starts=starts)


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The plan of all calls that give the answers of `trace`; its numbers, and those of all specs, are sizes.

    So are constants of its kernels that follow from sizes: calls of other constants have other kernels, by the same
    plan. Why an implementation was chosen is not told: the text has the numbers of one call.
    """

    op: Op
    attrs: Attributes  # of the call that is traced, as its sizes
    sizes: Sizes
    trace: Trace
    specs: Specs  # of the arguments
    results: tuple[Spec, ...]
    plan: Plan
    active: tuple[Launch, ...]
    workspace: dict[str, int]
    workspace_bytes: int

    @property
    def arguments(self) -> dict[str, Spec]:
        """Specs of the arguments that are given."""
        return {name: spec for name, spec in zip(self.op.tensors, self.specs, strict=True) if spec is not None}

    def _starts(self, placed: Mapping[str, Spec]) -> tuple[Start, ...]:
        """The launches, for arguments that begin where those of `placed` do."""
        specs = {name: replace(spec, alignment=placed[name].alignment) for name, spec in self.arguments.items()}
        arrays = [*specs, *self.plan.results]
        places = {name: (place, -1) for place, name in enumerate(arrays)}
        places |= {name: (len(arrays), number) for number, name in enumerate(self.workspace)}
        starts, programs = [], len(self.workspace)
        kernels: dict[Any, Specialization] = {}  # launches of a call's parts share the objects of all but their sizes
        for launch in self.active:
            after = programs + 1 + len(launch.size_values)
            sizes = ((-1, number) for number in range(programs + 1, after))
            arguments = *(places[name] for name in launch.reads), *sizes, *(places[name] for name in launch.writes)
            alike = launch.kernel, id(launch.constexprs), *launch.arrays.items(), *map(id, launch.options.values())
            if alike not in kernels:
                kernels[alike] = specialize(launch, self.plan, specs)
            starts.append(Start(kernels[alike], launch.starts_early(first=not starts), programs, arguments))
            programs = after
        return tuple(starts)

    def form(self, places: Sequence[Mapping[str, Spec]]) -> Form:
        """What is kept of the template, with launches for arguments that begin where those of each place do."""
        pairs, apart = distances(self.op, spaces(self.op, self.arguments, self.results, self.workspace_bytes))
        results = tuple((spec.shape, row_major(spec.shape)) for spec in self.results)
        of_launches = (number for launch in self.active for number in (launch.grid[0], *launch.size_values))
        numbers = *self.workspace.values(), *of_launches
        starts = tuple(map(self._starts, places))  # before the function, which ends the trace
        kernels = {id(start.kernel): start.kernel for each in starts for start in each}
        own = {name: [size for size in sizes_in(kernel) if not size.fixed] for name, kernel in kernels.items()}
        constants = tuple({id(size): size for sizes in own.values() for size in sizes}.values())
        at = {id(size): place for place, size in enumerate(constants)}
        function = self.trace.function((results, apart, self.workspace_bytes, numbers, constants))
        dtypes = tuple(spec.dtype for spec in self.results)
        calls = Calls(self.op, places, self.attrs, self.sizes, function, dtypes, pairs, (), starts)
        return Form(calls, constants, {name: tuple(at[id(size)] for size in sizes) for name, sizes in own.items()})

    def calls(self, places: Sequence[Mapping[str, Spec]]) -> Calls:
        """The calls whose kernels have the constants of the one that was traced."""
        form = self.form(places)
        return form.of(self.sizes, tuple(size.value for size in form.constants))

    def at(self, result: Any) -> Callable[..., Any]:
        """The function that gives `result` with the numbers of other sizes, or None if they have another template."""
        sizes = [*{id(size): size for size in sizes_in(result)}.values()]
        numbers = self.trace.function(tuple(sizes))

        def of(*values: int) -> Any:
            difference, computed = numbers(*values)
            if difference is not None:
                return None
            by_size = {id(size): number for size, number in zip(sizes, computed, strict=True)}
            return with_numbers(result, lambda size: by_size[id(size)])

        return of


def sizes_of(specs: Specs, attrs: Attributes) -> Sizes:
    """The sizes of a call in a template's order: shapes and strides of arrays, then attributes that are integers."""
    arrays = [size for spec in specs if spec is not None for size in (*spec.shape, *(spec.strides or ()))]
    return *arrays, *(value for value in attrs if type(value) in (int, Size))


def kind_of(op: Op, specs: Specs, attrs: Attributes) -> tuple[Any, ...]:
    """What a call depends on besides its sizes."""
    arrays = (spec and (spec.dtype, len(spec.shape), spec.strides is None, spec.alignment) for spec in specs)
    return op.name, *arrays, *(int if type(value) in (int, Size) else value for value in attrs)


def trace_call(op: Op, specs: Specs, attrs: Attributes, device: Device, implementation: str | None) -> Template:
    """Plan a call, as `make_plan` does, and note on what the plan depends. Sizes of a model are constants.

    Axes of one name are one size, if they are as large.
    """
    trace = Trace()
    constants: list[Size] = []
    axes: dict[str, Size] = {}
    others: list[tuple[Size, Size]] = []

    def along(axis: str, size: int) -> Any:
        here = trace.input(size)
        if axis not in GROWING:
            constants.append(here)
            return here
        first = axes.setdefault(axis, here)
        if first is here or first.value != size:
            return here
        others.append((here, first))
        return first

    def traced(spec: Spec, names: Sequence[str]) -> Spec:
        named = zip_longest(names[: len(spec.shape)], spec.shape, fillvalue="")
        return replace(
            spec, shape=tuple(starmap(along, named)), strides=spec.strides and tuple(map(trace.input, spec.strides))
        )

    sizes = sizes_of(specs, attrs)
    specs = tuple(spec and traced(spec, op.tensors[name].names) for name, spec in zip(op.tensors, specs, strict=True))
    trace.fix_all(constants)
    trace.equate(others)
    values = op.Values(*(trace.input(value) if type(value) is int else value for value in attrs))
    plan, results = make_plan(op, specs, values, device, implementation)
    plan = replace(plan, choices=())
    return Template(op, attrs, sizes, trace, specs, results, plan, plan.active, plan.workspace, plan.workspace_bytes)
