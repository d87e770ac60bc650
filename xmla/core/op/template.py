"""Plans of calls that differ in sizes alone: one is made with its sizes as symbols, the others are arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from xmla.core.op.memo import make_plan
from xmla.core.op.op import Op
from xmla.core.plan import Launch, Plan
from xmla.core.values import Attributes, Device, Size, Spec, Trace, sizes_in, with_numbers

Specs = tuple[Spec | None, ...]
Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The plan of all calls that give the answers of `trace`; its numbers, and those of all specs, are sizes.

    Kernels are compiled for the same constants in each of these calls. Why an implementation was chosen is not told:
    the text has the numbers of one call.
    """

    trace: Trace
    specs: Specs  # of the arguments
    results: tuple[Spec, ...]
    plan: Plan
    active: tuple[Launch, ...]
    workspace: dict[str, int]
    workspace_bytes: int

    def at(self, result: Any) -> Callable[..., Any]:
        """The function that gives `result` with the numbers of other sizes, or None if they have another template."""
        sizes = [*{id(size): size for size in sizes_in(result)}.values()]
        numbers = self.trace.function(tuple(sizes))

        def of(*values: int) -> Any:
            computed = numbers(*values)
            if computed is None:
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
    """Plan a call, as `make_plan` does, and note on what the plan depends."""
    trace = Trace()

    def traced(spec: Spec) -> Spec:
        shape = tuple(map(trace.input, spec.shape))
        return replace(spec, shape=shape, strides=spec.strides and tuple(map(trace.input, spec.strides)))

    specs = tuple(spec and traced(spec) for spec in specs)
    attrs = op.Values(*(trace.input(value) if type(value) is int else value for value in attrs))
    plan, results = make_plan(op, specs, attrs, device, implementation)
    constants: dict[int, Any] = {}  # parts of a call that are alike have the same objects
    launches = tuple(_with_constants(launch, trace, constants) for launch in plan.launches)
    plan = replace(plan, launches=launches, choices=())
    return Template(trace, specs, results, plan, plan.active, plan.workspace, plan.workspace_bytes)


def _with_constants(launch: Launch, trace: Trace, constants: dict[int, Any]) -> Launch:
    """The launch with values for all that its kernel is compiled for."""
    constexprs = constants.get(id(launch.constexprs))
    if constexprs is None:
        constexprs = constants[id(launch.constexprs)] = with_numbers(launch.constexprs, trace.fix)
    return replace(launch, constexprs=constexprs, **with_numbers(launch.options, trace.fix))
