"""The declaration of an op: tensors by axis name, attributes, outputs, implementations, reference, cases.

The docstring of the package `xmla` has the glossary of axes.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from textwrap import wrap
from typing import Any, NoReturn

import numpy as np

from xmla.core.call import (
    HALVES,
    Arrays,
    CalledAs,
    Limit,
    Problem,
    Result,
    Tensor,
    Work,
    declared_limits,
    each_array_once,
    pools_of,
)
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats import Format
from xmla.core.plan import Choice, Implementation, Plan, choose
from xmla.core.values import INTERPRETER, Agreement, Attr, Attributes, Device, Spec


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
class Case:
    """A named set of inputs: `make(rng)` gives NumPy arrays by argument name, `attrs` the keyword arguments."""

    name: str
    make: Callable[[np.random.Generator], dict[str, np.ndarray]]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Op:
    """An op, declared once.

    Attributes:
        prototype: The public signature and docstring: tensors positional (optional ones default to None), attributes
            keyword-only.
        tensors: The arguments. Rank, dtype, axes, density and formats are checked from them.
        outputs: The results, in order.
        reference: NumPy in float64; every implementation is compared with it. Takes the arguments by name, and gives a
            tuple of results; updates arrays in place.
        cases: Named inputs that tests, `xmla verify` and the compile matrix use.
        implementations: Kernels, best first; the last one serves every call. "reference" is always available as well.
        steps: Of a composed op: the ops that `implementations` calls in order. An implementation asked for by name is
            one of theirs.
        updates: The arguments updated in place; None if each element is exact.
        needs: The arguments, by names, that a result or an updated argument is computed from, where these are not all.
        check: The op's own rules.
        limits: The range of each index, page and length, for XMLA_CHECK.
        work: The least bytes and operations of a call. Every request is as long as its block table, or has `keys`
            keys; so is every row of keys after one another.
        derivative: The op that computes this op's gradients. Its arguments are this op's arguments by name, its results
            as `forward_<result>` and their gradients as `d<result>`; its results are the gradients `d<argument>` of
            the arguments that have one, empty for one that is not given. It takes attributes of the same names. One
            that takes any of this op's arguments does not serve calls with others; one of the results alone does. A
            result whose gradient it does not take is not differentiable, and a gradient of it is refused.
        batch: Computes several calls at once under vmap if a pool has a batch axis and folding it into one larger pool
            would compute unwanted elements. Takes (array module, call of an op by name, arrays with the batch as first
            axis, attributes).
        instead: What users call in place of an op that is none of theirs, such as the composed op that it is a step of:
            the front-ends have no function of it. Nor have they one of a derivative, which says nothing here.
    """

    prototype: Callable[..., Any]
    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Result]
    reference: Callable[..., tuple[Any, ...]]
    cases: tuple[Case, ...]
    implementations: tuple[Implementation, ...]
    steps: tuple["Op", ...] = ()
    updates: Mapping[str, Updated | None] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Problem], None] = lambda problem: None
    limits: Callable[[Problem, Arrays], Iterable[Limit]] = declared_limits
    work: Callable[[Problem, float | None], Work] = each_array_once
    batch: Callable[[Any, Callable[..., Any], Mapping[str, Any], Attributes], tuple[Any, ...]] | None = None
    derivative: "Op | None" = None
    instead: str = ""

    def __post_init__(self) -> None:
        declared = [*self.tensors, *self.Values._fields]
        if declared != [*self._parameters]:
            raise RuntimeError(f"{self.name} takes {[*self._parameters]}, declared: {declared}")
        parameters = inspect.signature(self.reference).parameters.values()
        taken = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        # One with `**others` takes some of the arrays so, and what names their formats, to call other ops' references.
        attributes = self.defaults.keys() - {tensor.format_attribute for tensor in self.tensors.values()}
        expected = declared if len(taken) == len(parameters) else [n for n in declared if n in {*taken, *attributes}]
        if taken != expected:
            raise RuntimeError(f"{self.name}: its reference takes {taken}, declared: {declared}")
        for name, tensor in self.tensors.items():
            if tensor.format_attribute not in ("", *self.Values._fields):
                raise RuntimeError(f"{self.name}: {name} declares {tensor.format_attribute}, which is no attribute")

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.prototype, eval_str=True).parameters

    @cached_property
    def name(self) -> str:
        return self.prototype.__name__

    @cached_property
    def optional(self) -> frozenset[str]:
        return frozenset(name for name in self.tensors if self._parameters[name].default is None)

    @cached_property
    def mutates(self) -> tuple[str, ...]:
        return tuple(self.updates)

    @cached_property
    def mutated(self) -> tuple[int, ...]:
        """Positions of `mutates` among the tensors."""
        return tuple([*self.tensors].index(name) for name in self.mutates)

    @cached_property
    def attrs(self) -> tuple[Attr, ...]:
        return tuple(
            Attr.of(name, p.annotation, None if p.default is p.empty else p.default)
            for name, p in self._parameters.items()
            if p.kind is p.KEYWORD_ONLY
        )

    def __repr__(self) -> str:
        return f"Op({self.name})"

    @property
    def pools(self) -> list[str]:
        return pools_of(self.tensors)

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
            sentences = ["those of " + ", ".join(step.name for step in self.steps if len(step.choices) > 1) + "."]
        else:
            sentences = [
                f"{each.asked}{', by its name alone' * each.by_name}: "
                f"{'; '.join(condition.supported for condition in each.conditions) or 'every call'}."
                for each in self.implementations
            ]
        lines = [line for text in sentences for line in wrap(text, 112, subsequent_indent="    ")]
        section = "\n".join(["    Implementations, best first:", *(f"        {line}" for line in lines)])
        if self.derivative is not None:
            section += f"\n\n    Derivative: {self.derivative.name}, of {', '.join(self.gradients)}."
        return f"{(self.prototype.__doc__ or '').rstrip()}\n\n{section}\n    "

    @property
    def partial(self) -> bool:
        """Whether elements of a result are left unwritten."""
        return any(result.partial for result in self.outputs.values())

    @property
    def sums_over_tokens(self) -> bool:
        """Whether a result is a sum over a call's tokens: it has no row of a token, nor of a request."""
        per_token = any("T" in tensor.names for tensor in self.tensors.values())
        return per_token and any({"T", "B"}.isdisjoint(result.names) for result in self.outputs.values())

    @property
    def reads_what_it_writes(self) -> bool:
        """Whether a token's results follow from what others of the same call write."""
        return bool(self.outputs and self.mutates)

    def indices_of(self, cache: str) -> list[str]:
        """The index tensors whose values name entries, or pages, of the cache."""
        pages = self.tensors[cache].names[0]
        return [name for name, tensor in self.tensors.items() if tensor.index_of.split()[:1] == [pages]]

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Each attribute's default, in order; None for a required one."""
        return {attr.name: attr.default for attr in self.attrs}

    @cached_property
    def Values(self) -> type[Attributes]:
        """The class of a call's attributes, a named tuple. It checks nothing: `attributes` does.

        Made with the op, since torch.compile can trace its use, but not its making.
        """
        return namedtuple(self.name, self.defaults, defaults=self.defaults.values())

    def attributes(self, *values: Any, **named: Any) -> Attributes:
        """A call's attributes in Python's own types, in order or by name; the others have their defaults.

        Raises:
            ArgumentError: A value does not have the declared type, or is a float that kernels cannot hold.
        """
        complete = self.Values(*values, **named)
        return self.Values(*[attr.plain(self.name, value) for attr, value in zip(self.attrs, complete, strict=True)])

    def bind(
        self, specs: Mapping[str, Spec | None], attrs: Attributes, implementation: str | None = None,
        called_as: CalledAs | None = None,
    ) -> Problem:  # fmt: skip
        """Check a call against the declaration. Sizes may be symbolic; no value is read."""
        present = {name: spec for name, spec in specs.items() if spec is not None}
        axes: dict[str, int] = {}  # these three are filled below
        formats: dict[str, Format] = {}
        results: dict[str, Spec] = {}
        problem = Problem(self.name, self.tensors, present, attrs, axes, formats, results, implementation, called_as)
        first: dict[str, str] = {}  # the argument that gave each axis its size
        for name, tensor in self.tensors.items():
            if name not in present:
                if name not in self.optional:
                    problem.refuse(name, "argument", "missing", "an array")
                continue
            self._check_tensor(problem, name, tensor, present[name], axes, first)
        for name, tensor in self.tensors.items():
            if tensor.format is not None and name in present:
                formats[name] = tensor.format(problem, name)
        self.check(problem)
        results |= {name: result.spec(problem) for name, result in self.outputs.items()}
        if implementation == "reference" and self.steps:  # their rules, which their own references do not check
            self.plan(replace(problem, implementation=None), INTERPRETER)
        return problem

    def choose(self, problem: Problem, device: Device) -> tuple[Implementation, Choice]:
        """Which implementation serves the call, and why.

        Those asked for of a composed op are its steps', of which each takes the names that are its own.
        """
        asked = problem.implementation if problem.implementation in self.choices and not self.steps else None
        return choose(self.implementations, problem, device, asked)

    def plan(self, problem: Problem, device: Device) -> Plan:
        implementation, choice = self.choose(problem, device)
        plan = implementation.plan(problem, device)
        return replace(plan, choices=(choice, *plan.choices)) if len(self.implementations) > 1 else plan

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
                apart = "pages" if len(spec.shape) > 2 else "rows"
                expected = f"at least {page}: {apart} that are written lie apart"
                problem.refuse(name, f"stride of axis {tensor.names[0]} (axis 0)", spec.strides[0], expected)

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

    @property
    def gradients(self) -> dict[str, str]:
        """The arguments that have a gradient, and the derivative's results that hold it."""
        names = {name: f"d{name}" for name in self.tensors}
        return {n: d for n, d in names.items() if self.derivative is not None and d in self.derivative.outputs}

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The results whose gradients the derivative takes."""
        taken = () if self.derivative is None else self.derivative.tensors
        return tuple(name for name in self.outputs if f"d{name}" in taken)

    def check_devices(self, devices: Mapping[str, str | None]) -> None:
        """Refuse an argument on another device than the first one's; None is a device that is not known."""
        leading, expected = next(iter(devices.items()))
        for name, device in devices.items():
            if None not in (device, expected) and device != expected:
                raise ArgumentError(f"{self.name}: {name} device is {device}, expected {expected}, as {leading}")

    def check_implementation(self, implementation: str | None) -> None:
        choices = (None, *self.choices, "reference")
        if implementation not in choices:
            raise UnsupportedError(
                f"{self.name}: implementation is {implementation!r}, supported: "
                f"{', '.join(repr(choice) for choice in choices)}"
            )
