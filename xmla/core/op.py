"""The declaration of an op: tensors by axis name, attributes, outputs, plan, reference, cases.

The docstring of the package `xmla` has the glossary of axes.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from textwrap import wrap
from typing import Any, NoReturn

import numpy as np

from xmla.core.attribute import Attr
from xmla.core.config import settings
from xmla.core.device import INTERPRETER, MIN_ARCH, MIN_E4M3_ARCH, Device
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats import Format
from xmla.core.plan import Choice, Part, Plan, join
from xmla.core.spec import Spec
from xmla.core.tolerance import Agreement
from xmla.core.work import Work

INDEX = ("int32",)
FLOATS = ("bfloat16", "float16", "float32")
HALVES = ("bfloat16", "float16")
F32 = ("float32",)
E4M3 = ("float8_e4m3fn",)
BYTES = ("uint8", "int8", "float8_e4m3fn")  # dtypes of a packed cache: any one-byte dtype
# Kernels count rows and columns in 32 bits, and the tiles of the programs that share a row reach up to 2**18 past the
# size.
LARGEST_SIZE = 2**31 - 2**20


Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument: axes by name (equal names have equal sizes across the arguments) and the dtypes accepted.

    Attributes:
        index_of: Of index tensors: the axes that the values index, flattened. Values out of range name nothing.
        bound_of: Of integers that bound a range: the axis to whose size they are clamped.
        format: Of paged caches: a function that finds the format of the argument of that name, or refuses it.
    """

    axes: str
    dtypes: tuple[str, ...]
    index_of: str = ""
    bound_of: str = ""
    format: "Callable[[Problem, str], Format] | None" = None

    @property
    def names(self) -> list[str]:
        return self.axes.split()


@dataclass(frozen=True, slots=True)
class Result:
    """A result: axes by name, dtype, and its tolerance against the reference.

    Attributes:
        dtype: A name, or a function of the call that gives one.
        sizes: Sizes of the axes that no argument has.
        agreement: How it may differ from the reference; None: not at all.
        partial: Whether the op leaves elements unwritten; the reference has NaN there.
    """

    axes: str
    dtype: "str | Callable[[Problem], str]"
    sizes: "Mapping[str, Callable[[Problem], int]]" = field(default_factory=dict)
    agreement: Agreement | None = None
    partial: bool = False

    @property
    def names(self) -> list[str]:
        return self.axes.split()

    def spec(self, problem: "Problem") -> Spec:
        shape = (self.sizes[name](problem) if name in self.sizes else problem[name] for name in self.names)
        return Spec(tuple(shape), self.dtype if isinstance(self.dtype, str) else self.dtype(problem))

    def written(self, reference: np.ndarray) -> np.ndarray | None:
        """Where the op writes, according to the reference; None: everywhere."""
        return ~np.isnan(reference) if self.partial else None


@dataclass(frozen=True, slots=True)
class Updated:
    """An argument that is updated in place and whose elements are computed, not only moved or rounded once.

    Attributes:
        values: The values of the elements, from the array, the call's arguments and attributes: one row per entry.
        agreement: How these may differ from the reference's.
    """

    values: Callable[[np.ndarray, Arrays, Mapping[str, Any]], np.ndarray]
    agreement: Callable[[np.ndarray, Arrays, Mapping[str, Any]], Agreement]


@dataclass(frozen=True, slots=True)
class Limit:
    """Elements of `argument` must lie in [low, high]; only those at `where`, if given."""

    argument: str
    low: int
    high: int
    where: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A named set of inputs: `make(rng)` gives NumPy arrays by argument name, `attrs` the keyword arguments."""

    name: str
    make: Callable[[np.random.Generator], dict[str, np.ndarray]]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Whole:
    """The call of a composed op that another op's call is a step of, for errors.

    A step's argument `a` is called `names[a]` there.
    """

    op: str
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Problem:
    """A call that passed the declaration's checks.

    `axes` holds every axis size by name, `formats` the format of each paged cache that was given.
    """

    op: "Op"
    specs: Mapping[str, Spec]
    attrs: Mapping[str, Any]
    axes: Mapping[str, int]
    formats: Mapping[str, Any]
    implementation: str | None = None  # the one asked for by name
    whole: "Whole | None" = None  # the call that this one is a step of

    def __getitem__(self, axis: str) -> int:
        return self.axes[axis]

    def has(self, argument: str) -> bool:
        return argument in self.specs

    def stand_ins(self, **stand_ins: str) -> dict[str, str]:
        """For each optional argument that is not given, the array whose pointer kernels get instead and never read."""
        return {argument: array for argument, array in stand_ins.items() if argument not in self.specs}

    def called(self, argument: str) -> str:
        """The caller's name of an argument."""
        return argument if self.whole is None else self.whole.names.get(argument, argument)

    def require_count(self, attribute: str, least: int = 1) -> None:
        """An attribute that counts something is at least `least`, and no more than kernels count."""
        value = self.attrs[attribute]
        if value < least:
            self.refuse(attribute, "value", value, f"at least {least}")
        if value > LARGEST_SIZE:
            self.unsupported(attribute, "value", value, f"at most {LARGEST_SIZE}")

    def require_dense_entries(self, cache: str) -> None:
        """Entries of a page are dense; only the page stride is free."""
        spec = self.specs[cache]
        if not spec.has_stride(1, spec.shape[2]):
            self.refuse(cache, "stride of axis R (axis 1)", spec.stride(1), f"{spec.shape[2]} (dense entries)")

    def require_pages(self, cache: str, alignment: int) -> None:
        """Entries of a page are dense, and every page starts on a multiple of `alignment` bytes."""
        self.require_dense_entries(cache)
        spec, expected = self.specs[cache], f"a multiple of {alignment} bytes"
        if spec.stride(0) % alignment:
            self.refuse(cache, "stride of axis P (axis 0)", spec.stride(0), expected)
        if spec.alignment % alignment:
            self.refuse(cache, "alignment of the first byte", spec.alignment, expected)

    def refuse(self, argument: str, what: str, got: object, expected: object) -> NoReturn:
        """Raise the error of a wrong argument; all have this one form."""
        raise ArgumentError(f"{self._place(argument)} {what} is {got}, expected {expected}")

    def unsupported(self, argument: str, what: str, got: object, supported: object) -> NoReturn:
        raise UnsupportedError(f"{self._place(argument)} {what} is {got}, supported: {supported}")

    def _place(self, argument: str) -> str:
        return f"{self.op.name if self.whole is None else self.whole.op}: {self.called(argument)}"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition under which an implementation serves a call.

    Attributes:
        supported: The condition in words, for errors and documents.
        unmet: What a call has instead, or None if it meets the condition.
    """

    supported: str
    unmet: Callable[[Problem, Device], str | None]


@dataclass(frozen=True, slots=True)
class Implementation:
    """Kernels of an op and the calls that they serve: those that meet every condition.

    Attributes:
        name: Its own, in plans.
        asked: What `implementation` asks for; several implementations may have one.
        tokens_a_program: Of ops whose calls are planned in parts: the tokens of a program, by which parts are rounded.
    """

    name: str
    plan: Callable[[Problem, Device], Plan]
    conditions: tuple[Condition, ...] = ()
    asked: str = "triton"
    tokens_a_program: Callable[[Problem, Device], int] | None = None

    def unmet(self, problem: Problem, device: Device) -> tuple[str, str] | None:
        """The first condition that the call does not meet: what the call has, and what is supported."""
        for condition in self.conditions:
            if (got := condition.unmet(problem, device)) is not None:
                return got, condition.supported
        return None


def everything_once(problem: Problem, keys: int | None) -> list[Work]:
    """The work of an op that reads its arguments and writes its results once."""
    specs = [*problem.specs.values(), *problem.op.result_specs(problem).values()]
    return [Work(sum(spec.nbytes for spec in specs))]


def rest_once(problem: Problem) -> Work:
    """Everything but the pools of a call: the other arguments read, and the results written, once."""
    others = [spec for name, spec in problem.specs.items() if name not in problem.op.pools]
    return Work(sum(spec.nbytes for spec in (*others, *problem.op.result_specs(problem).values())))


def declared_limits(problem: Problem, arrays: Arrays) -> Iterable[Limit]:
    """The range of each integer that indexes or bounds axes, by its declaration; an index may be −1."""
    for name, tensor in problem.op.tensors.items():
        if name in arrays and tensor.index_of:
            yield Limit(name, -1, prod(problem[axis] for axis in tensor.index_of.split()) - 1)
        elif name in arrays and tensor.bound_of:
            yield Limit(name, 0, problem[tensor.bound_of])


@dataclass(frozen=True, eq=False)
class Op:
    """An op, declared once.

    Attributes:
        prototype: The public signature and docstring: tensors positional (optional ones default to None), attributes
            keyword-only.
        tensors: The arguments. Rank, dtype, axes, density, devices and formats are checked from them.
        outputs: The results, in order. An op with `updates` has none.
        reference: NumPy in float64; every implementation is compared with it. Gives a tuple of results; updates arrays
            in place.
        cases: Named inputs that tests, `xmla verify` and the compile matrix use.
        implementations: Kernels, best first; the last one serves every call. "reference" is always available as well.
        steps: Of a composed op: the ops that `implementations` calls in order. An implementation asked for by name is
            one of theirs.
        updates: The arguments updated in place; None if each element is exact.
        check: The op's own rules.
        limits: The range of each index, page and length, for XMLA_CHECK.
        work: The least bytes and operations of a call, step by step. Every request is as long as its block table, or
            has `keys` keys.
        derivative: The op that computes this op's gradients. Its arguments are this op's arguments by name, its results
            as `forward_<result>` and their gradients as `d<result>`; its results are the gradients `d<argument>` of
            the arguments that have one, empty for one that is not given. It takes attributes of the same names. One
            that takes any of this op's arguments does not serve calls with others; one of the results alone does. A
            result whose gradient it does not take is a constant.
        batch: Computes several calls at once under vmap if a pool has a batch axis and folding it into one larger pool
            would compute unwanted elements. Takes (array module, call of an op by name, arrays with the batch as first
            axis).
    """

    prototype: Callable[..., Any]
    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Result]
    reference: Callable[..., tuple[Any, ...]]
    cases: tuple[Case, ...]
    implementations: tuple[Implementation, ...]
    steps: tuple["Op", ...] = ()
    updates: Mapping[str, Updated | None] = field(default_factory=dict)
    check: Callable[[Problem], None] = lambda problem: None
    limits: Callable[[Problem, Arrays], Iterable[Limit]] = declared_limits
    work: Callable[[Problem, int | None], list[Work]] = everything_once
    batch: Callable[[Any, Callable[..., Any], Mapping[str, Any]], tuple[Any, ...]] | None = None
    derivative: "Op | None" = None
    name: str = field(init=False)
    optional: frozenset[str] = field(init=False)
    mutates: tuple[str, ...] = field(init=False)
    mutated: tuple[int, ...] = field(init=False)  # positions of `mutates` among the tensors
    attrs: tuple[Attr, ...] = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.prototype, eval_str=True).parameters
        positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if positional != list(self.tensors):
            raise RuntimeError(f"{self.prototype.__name__} takes {positional}, declared: {list(self.tensors)}")
        object.__setattr__(self, "name", self.prototype.__name__)
        object.__setattr__(self, "optional", frozenset(n for n in positional if parameters[n].default is None))
        object.__setattr__(self, "mutates", tuple(self.updates))
        object.__setattr__(self, "mutated", tuple(positional.index(n) for n in self.mutates))
        attrs = tuple(
            Attr.of(n, p.annotation, None if p.default is p.empty else p.default)
            for n, p in parameters.items()
            if p.kind is p.KEYWORD_ONLY
        )
        object.__setattr__(self, "attrs", attrs)

    def __repr__(self) -> str:
        return f"Op({self.name})"

    @property
    def pools(self) -> list[str]:
        """The arguments whose last axis is an entry's row: paged caches, and the indexer's keys one after the other."""
        return [name for name, tensor in self.tensors.items() if tensor.names[-1].endswith("ROW")]

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that `implementation` takes besides "reference", best first."""
        own = [implementation.asked for implementation in self.implementations]
        names = [name for step in self.steps for name in step.choices] if self.steps else own
        return tuple(dict.fromkeys(names))

    @property
    def doc(self) -> str:
        """The public docstring: the prototype's, and a list of what each implementation serves."""
        if self.steps:
            told = ["those of " + ", ".join(step.name for step in self.steps if len(step.choices) > 1) + "."]
        else:
            told = [
                f"{each.asked}: {'; '.join(condition.supported for condition in each.conditions) or 'every call'}."
                for each in self.implementations
            ]
        lines = [line for text in told for line in wrap(text, 112, subsequent_indent="    ")]
        section = "\n".join(["    Implementations, best first:", *(f"        {line}" for line in lines)])
        if self.derivative is not None:
            section += f"\n\n    Derivative: {self.derivative.name}, of {', '.join(self.gradients)}."
        return f"{(self.prototype.__doc__ or '').rstrip()}\n\n{section}\n    "

    @property
    def partial(self) -> bool:
        """Whether elements of a result are left unwritten."""
        return any(result.partial for result in self.outputs.values())

    @property
    def rows_apart(self) -> bool:
        """Whether every token has its own row of each result: none is a sum over tokens."""
        per_token = any("T" in tensor.names for tensor in self.tensors.values())
        return not per_token or all("T" in result.names for result in self.outputs.values())

    def indices_of(self, cache: str) -> list[str]:
        """The index tensors whose values name entries, or pages, of the cache."""
        pages = self.tensors[cache].names[0]
        return [name for name, tensor in self.tensors.items() if tensor.index_of.split()[:1] == [pages]]

    @property
    def defaults(self) -> dict[str, Any]:
        """Each attribute's default, in order; None for a required one."""
        return {attr.name: attr.default for attr in self.attrs}

    def bind(
        self, specs: Mapping[str, Spec | None], attrs: Mapping[str, Any], implementation: str | None = None,
        whole: Whole | None = None,
    ) -> Problem:  # fmt: skip
        """Check a call against the declaration. Sizes may be symbolic; no value is read."""
        given = {name: spec for name, spec in specs.items() if spec is not None}
        axes: dict[str, int] = {}  # filled below
        formats: dict[str, Format] = {}
        problem = Problem(self, given, self.plain_attributes(attrs), axes, formats, implementation, whole)
        first: dict[str, str] = {}  # the argument that gave each axis its size
        for name, tensor in self.tensors.items():
            if name not in given:
                if name not in self.optional:
                    problem.refuse(name, "argument", "missing", "an array")
                continue
            self._check_tensor(problem, name, tensor, given[name], axes, first)
        for name, tensor in self.tensors.items():
            if tensor.format is not None and name in given:
                formats[name] = tensor.format(problem, name)
        self.check(problem)
        if implementation == "reference" and self.steps:  # their rules, which their own references do not check
            self.plan(replace(problem, implementation=None), INTERPRETER)
        return problem

    def choose(self, problem: Problem, device: Device) -> tuple[Implementation, Choice]:
        """The first implementation that serves the call, of those asked for if some were; and why the first.

        Raises:
            UnsupportedError: None of those asked for serves the call. The one that meets most conditions says why, of
                equals the last.
        """
        asked = None if self.steps else problem.implementation
        passed_over: list[tuple[str, str, str]] = []
        nearest = 0, 0
        for implementation in self.implementations:
            if asked in (None, implementation.asked):
                unmet = implementation.unmet(problem, device)
                if unmet is None:
                    return implementation, Choice(self.name, implementation.name, tuple(passed_over))
                met = [condition.supported for condition in implementation.conditions].index(unmet[1])
                nearest = max(nearest, (met, len(passed_over)))
                passed_over.append((implementation.name, *unmet))
        _, got, supported = passed_over[nearest[1]]
        problem.unsupported("implementation", "value", f"{asked!r} {got}", supported)

    def plan(self, problem: Problem, device: Device) -> Plan:
        implementation, choice = self.choose(problem, device)
        plan = implementation.plan(problem, device)
        return replace(plan, choices=(choice, *plan.choices)) if len(self.implementations) > 1 else plan

    def plain_attributes(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes in Python's own types, in order.

        Raises:
            ArgumentError: A value does not have the declared type, or is a float that kernels cannot hold.
        """
        return {attr.name: attr.plain(self.name, attrs[attr.name]) for attr in self.attrs}

    def _check_tensor(
        self, problem: Problem, name: str, tensor: Tensor, spec: Spec, axes: dict[str, int], first: dict[str, str]
    ) -> None:
        if len(spec.shape) != len(tensor.names):
            problem.refuse(name, "rank", len(spec.shape), f"{len(tensor.names)} ({', '.join(tensor.names)})")
        # The reference alone computes in float64, for checks of a derivative by finite differences.
        exact = problem.implementation == "reference" and spec.dtype == "float64" and HALVES[0] in tensor.dtypes
        if spec.dtype not in tensor.dtypes and not exact:
            narrowed = " (.int() in torch, .astype('int32') in JAX)" if spec.dtype == "int64" else ""
            problem.refuse(
                name, "dtype", spec.dtype, " or ".join(tensor.dtypes) + narrowed * ("int32" in tensor.dtypes)
            )
        for label, size in zip(tensor.names, spec.shape, strict=True):
            if axes.setdefault(label, size) != size:
                self._refuse_axis(problem, label, first[label], name)
            first.setdefault(label, name)
        if not spec.has_stride(-1, 1):
            problem.refuse(name, f"stride of axis {tensor.names[-1]} (the last)", spec.stride(-1), "1 (dense)")
        if name in self.mutates and spec.strides is not None:
            page = prod(spec.shape[1:])
            if spec.strides[0] < page and not spec.has_stride(0, page):
                expected = f"at least {page}: pages that are written lie apart"
                problem.refuse(name, f"stride of axis {tensor.names[0]} (axis 0)", spec.strides[0], expected)
        other, leading = next(iter(problem.specs.items()))
        if None not in (spec.device, leading.device) and spec.device != leading.device:
            problem.refuse(name, "device", spec.device, f"{leading.device}, as {problem.called(other)}")

    def _refuse_axis(self, problem: Problem, label: str, earlier: str, later: str) -> NoReturn:
        """Refuse one of two arguments with other sizes of an axis: the later one, unless more have its size."""
        sizes = {
            name: spec.shape[tensor.names.index(label)]
            for name, tensor in self.tensors.items()
            if (spec := problem.specs.get(name)) and label in tensor.names and len(spec.shape) == len(tensor.names)
        }
        of_later, of_earlier = (sum(size == sizes[one] for size in sizes.values()) for one in (later, earlier))
        wrong, right = (earlier, later) if of_later > of_earlier else (later, earlier)
        axis = self.tensors[wrong].names.index(label)
        expected = f"{sizes[right]}, as {problem.called(right)}"
        problem.refuse(wrong, f"axis {label} (axis {axis})", sizes[wrong], expected)

    def result_specs(self, problem: Problem) -> dict[str, Spec]:
        return {name: result.spec(problem) for name, result in self.outputs.items()}

    @property
    def gradients(self) -> dict[str, str]:
        """The arguments that have a gradient, and the derivative's results that hold it."""
        names = {name: f"d{name}" for name in self.tensors}
        return {n: d for n, d in names.items() if self.derivative is not None and d in self.derivative.outputs}

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The results that are not constants of a call that is differentiated."""
        taken = () if self.derivative is None else self.derivative.tensors
        return tuple(name for name in self.outputs if f"d{name}" in taken)

    def derivative_call(
        self, arguments: Mapping[str, Any], results: Iterable[Any], gradients: Iterable[Any],
        zeros_like: Callable[[Any], Any], attrs: tuple[Any, ...], implementation: str | None,
    ) -> "DerivativeCall":  # fmt: skip
        """The derivative's call, of a call's arguments, results and their gradients, None for one that is zero."""
        if self.derivative is None:
            raise RuntimeError(f"{self.name} has no derivative")
        named = dict(arguments)
        for name, result, gradient in zip(self.outputs, results, gradients, strict=True):
            named[f"forward_{name}"] = result
            if name in self.differentiable:
                if gradient is None and f"d{name}" not in self.derivative.optional:
                    gradient = zeros_like(result)
                named[f"d{name}"] = gradient
            elif gradient is not None:
                supported = f"derivatives of {', '.join(self.differentiable)}"
                raise UnsupportedError(f"{self.name}: the result {name} is differentiated, supported: {supported}")
        values = dict(zip(self.defaults, attrs, strict=True))
        return DerivativeCall(
            self.derivative,
            {name: named[name] for name in self.derivative.tensors if named.get(name) is not None},
            tuple(values[name] for name in self.derivative.defaults),
            implementation if implementation in (*self.derivative.choices, "reference") else None,
        )

    def refuse_derivative(self, argument: str, constant: str) -> NoReturn:
        """Raise for an argument that is differentiated in a way that has no derivative, whatever the op has."""
        self._refuse_derivative(f"{argument} is differentiated", self._without_derivative, constant)

    @property
    def _without_derivative(self) -> str:
        """What an argument without one has to be, and which steps of a composed op have derivatives."""
        steps = [step.name for step in self.steps if step.derivative is not None]
        return "constants" + (f" (its step {', '.join(steps)} has derivatives)" if steps else "")

    def check_derivative(
        self, constants: Mapping[str, str], specs: Mapping[str, Spec | None], attrs: Mapping[str, Any],
        implementation: str | None,
    ) -> None:  # fmt: skip
        """Refuse a call that is differentiated with respect to some arguments, if there is no such derivative.

        `constants`: for each of them the framework's call that makes it a constant.

        Raises:
            UnsupportedError: The op or the argument has no derivative, or the derivative does not take an argument or a
                format of the call.
        """
        supported = f"derivatives of {', '.join(self.gradients)}" if self.gradients else self._without_derivative
        for argument, constant in constants.items():
            if argument not in self.gradients:
                self._refuse_derivative(f"{argument} is differentiated", supported, constant)
        if self.derivative is None or not constants:
            return
        argument, constant = next(iter(constants.items()))
        problem = self.bind(specs, attrs, implementation)
        of_results_alone = self.derivative.tensors.keys().isdisjoint(self.tensors)
        for name in problem.specs:
            if name not in self.derivative.tensors and not of_results_alone:
                self._refuse_derivative(f"{argument} is differentiated with {name}", f"{supported} without", constant)
        results = self.result_specs(problem)
        gradients = [spec if name in self.differentiable else None for name, spec in results.items()]
        values = tuple(attrs[name] for name in self.defaults)
        given = problem.specs, results.values(), gradients
        call = self.derivative_call(*given, lambda spec: spec, values, implementation)
        call.op.bind(call.arguments, call.attributes, call.implementation, Whole(self.name, {}))

    def _refuse_derivative(self, what: str, supported: str, constant: str) -> NoReturn:
        raise UnsupportedError(f"{self.name}: {what}, supported: {supported}; {constant} makes it a constant")

    def check_implementation(self, implementation: str | None) -> None:
        choices = (None, *self.choices, "reference")
        if implementation not in choices:
            raise UnsupportedError(
                f"{self.name}: implementation is {implementation!r}, supported: "
                f"{', '.join(repr(choice) for choice in choices)}"
            )


@dataclass(frozen=True, slots=True)
class DerivativeCall:
    """A call of an op's derivative: `arguments` are those given, `attrs` follow `op.attrs`."""

    op: Op
    arguments: dict[str, Any]
    attrs: tuple[Any, ...]
    implementation: str | None

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(zip(self.op.defaults, self.attrs, strict=True))


def plan_call(
    op: Op, specs: tuple[Spec | None, ...], attrs: tuple[Any, ...], device: Device, implementation: str | None = None
) -> tuple[Plan, tuple[Spec, ...]]:
    """Bind and plan a call, memoised: the plan and the specs of its results, in order.

    `specs` follow `op.tensors`, `attrs` follow `op.attrs`.
    """
    values = op.plain_attributes(dict(zip(op.defaults, attrs, strict=True)))  # checked here: to the memo True equals 1
    return _plan_call(op, specs, tuple(values.values()), device, implementation)


@lru_cache(maxsize=1 << 14)
def _plan_call(
    op: Op, specs: tuple[Spec | None, ...], attrs: tuple[Any, ...], device: Device, implementation: str | None
) -> tuple[Plan, tuple[Spec, ...]]:
    names = dict(zip(op.tensors, specs, strict=True))
    values = dict(zip(op.defaults, attrs, strict=True))
    op.check_implementation(implementation)
    if implementation == "reference":
        raise UnsupportedError(f"{op.name}: implementation 'reference' is the function's alone; a plan has kernels")
    problem = op.bind(names, values, implementation)
    plan = op.plan(problem, device)
    _check_architecture(problem, plan, device)
    for launch in plan.launches:
        for name, size in launch.sizes.items():
            if size > LARGEST_SIZE:
                supported = f"sizes and strides in elements up to {LARGEST_SIZE}"
                raise UnsupportedError(f"{op.name}: {name} of {launch.name} is {size}, supported: {supported}")
    if settings.print_plans:
        print(f"{op.name} on {device.name}: {plan}", file=sys.stderr)
    return plan, tuple(op.result_specs(problem).values())


def _check_architecture(problem: Problem, plan: Plan, device: Device) -> None:
    """Refuse a device without the instructions that the plan's arrays need."""
    if device.arch == INTERPRETER.arch:
        return
    buffers = {name: spec for name, spec in plan.buffers.items() if spec.dtype != "int8"}  # marks are numbers
    packed = [name for name, spec in {**problem.specs, **buffers}.items() if spec.itemsize == 1]
    least, why = (MIN_E4M3_ARCH, f" for the e4m3 of {packed[0]}") if packed else (MIN_ARCH, "")
    if device.arch < least:
        got, supported = (f"{arch // 10}.{arch % 10}" for arch in (device.arch, least))
        raise UnsupportedError(
            f"{problem.op.name}: device {device.name} has compute capability {got}, "
            f"supported: {supported} and later{why}"
        )


class Steps:
    """Ops called one after another as one call: the plan of a composed op.

    `called`: for errors, the arguments of the whole from which a step's arguments are computed, if they are not the
    same.
    """

    def __init__(self, whole: Problem, device: Device, called: Mapping[str, str] | None = None) -> None:
        self.whole = whole
        self.device = device
        self.called = called or {}
        self.arrays: dict[str, Spec] = dict(whole.specs)
        self.parts: list[Part] = []

    def call(self, op: Op, same: str, renamed: Mapping[str, str] | None = None, **attrs: Any) -> None:
        """Call `op` with the whole's arrays named in `same`, and `renamed[argument]` for arguments of other names.

        Its results become arrays of the whole. Optional arguments that the whole does not have are not given.
        """
        names = {name: name for name in same.split()} | dict(renamed or {})
        specs = {argument: self.arrays.get(name) for argument, name in names.items()}
        asked = self.whole.implementation if self.whole.implementation in op.choices else None
        owner = self.whole.op.name if self.whole.whole is None else self.whole.whole.op
        told = {argument: self.whole.called(name) for argument, name in {**names, **self.called}.items()}
        problem = op.bind(specs, op.defaults | attrs, asked, Whole(owner, told))
        self.add(Part(op.name, op.plan(problem, self.device), names | {name: name for name in op.outputs}))

    def add(self, part: Part) -> None:
        """Run `part` next."""
        self.parts.append(part)
        self.arrays |= {part.names[n]: spec for n, spec in part.plan.buffers.items() if n in part.names}

    def plan(self) -> Plan:
        return join(self.parts, tuple(self.whole.op.outputs))
