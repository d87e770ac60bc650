"""The declaration of an op: tensors by axis name, attributes, outputs, plan, reference, cases.

Glossary of axes, the same everywhere:
  T query tokens, flat over all requests     B requests               M pages of a request in a block table
  H query heads                              I indexer heads          D indexer head dim
  K selected keys a token (top-k)            N keys                   P pages in a cache      R entries a page
  L latent dims (512, V4: 448)               E rope dims (64)         ROW bytes or elements of an entry
  S positions of a table of rotations
  r tokens a compressed entry stands for     C series that a token gives a compressor
  W parts of a result, one a rank
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NoReturn

import numpy as np

from xmla.core.attribute import Attr
from xmla.core.checks import Limit
from xmla.core.config import settings
from xmla.core.device import INTERPRETER, MIN_ARCH, MIN_E4M3_ARCH, Device
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.plan import Plan
from xmla.core.spec import Spec

INDEX = ("int32",)
FLOATS = ("bfloat16", "float16", "float32")
HALVES = ("bfloat16", "float16")
F32 = ("float32",)
E4M3 = ("float8_e4m3fn",)
BYTES = ("uint8", "int8", "float8_e4m3fn")  # a packed cache, under any one-byte dtype
# Kernels count rows and columns in 32 bits, by the tiles of all programs that share a row: up to 2**18 past the size.
LARGEST_SIZE = 2**31 - 2**20


@dataclass(frozen=True, slots=True)
class Tensor:
    """Axes by name (equal names have equal sizes across the arguments) and the dtypes accepted.

    Attributes:
        index_of: Of integers that name places: the axes that they count over, flattened; others name nothing.
        bound_of: Of integers that bound a range: the axis, to whose size they are clamped.
    """

    axes: str
    dtypes: tuple[str, ...]
    index_of: str = ""
    bound_of: str = ""

    @property
    def names(self) -> list[str]:
        return self.axes.split()


@dataclass(frozen=True, slots=True)
class Case:
    """A named set of inputs: `make(rng)` gives NumPy arrays by argument name, `attrs` the keyword arguments."""

    name: str
    make: Callable[[np.random.Generator], dict[str, np.ndarray]]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Whole:
    """An op that calls another for a part of its work, as errors name it: what the part calls `names[…]` otherwise."""

    op: str
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Problem:
    """A call that passed the declaration's checks; `axes` holds every axis size by name."""

    op: "Op"
    specs: Mapping[str, Spec]
    attrs: Mapping[str, Any]
    axes: Mapping[str, int]
    implementation: str | None = None  # the one asked for by name
    whole: "Whole | None" = None  # the call that this one is a part of

    def __getitem__(self, axis: str) -> int:
        return self.axes[axis]

    def has(self, argument: str) -> bool:
        return argument in self.specs

    def either(self, argument: str, stand_in: str) -> str:
        """`argument` if it was given, else another one that can stand in as a valid pointer never read."""
        return argument if argument in self.specs else stand_in

    @property
    def tokens_a_request(self) -> int:
        """Adjacent tokens of every request, of a call without request ids; with them, or of an empty call, 1."""
        return 1 if self.has("request_ids") else max(self["T"] // max(self["B"], 1), 1)

    def called(self, argument: str) -> str:
        """The caller's name of an argument."""
        return argument if self.whole is None else self.whole.names.get(argument, argument)

    def require_dense_entries(self, cache: str) -> None:
        """Entries of a page are dense; only the page stride is free."""
        spec = self.specs[cache]
        if spec.shape[1] > 1 and spec.stride(1) != spec.shape[2]:
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
        """Raise the one kind of message wrong arguments get."""
        raise ArgumentError(f"{self._place(argument)} {what} is {got}, expected {expected}")

    def unsupported(self, argument: str, what: str, got: object, supported: object) -> NoReturn:
        raise UnsupportedError(f"{self._place(argument)} {what} is {got}, supported: {supported}")

    def _place(self, argument: str) -> str:
        return f"{self.op.name if self.whole is None else self.whole.op}: {self.called(argument)}"

    def takes_by_hand(self, unmet: tuple[str, str] | None) -> bool:
        """Whether the kernel written by hand is to run, which it does by default wherever it can.

        `unmet`: what of the call it is not written for, and what it supports there.
        """
        if unmet is not None and self.implementation == "gluon":
            self.unsupported("implementation", "value", f"'gluon' {unmet[0]}", unmet[1])
        return unmet is None and self.implementation in (None, "gluon")


@dataclass(frozen=True, eq=False)
class Op:
    """An op, declared once.

    `prototype` is the public signature and docstring: tensors positional (optional ones default to None), attributes
    keyword-only. `outputs` gives each result's spec, in order; an op with `mutates` updates those arguments in place
    and has none. `check` holds the op's own rules; rank, dtype, axes, density and devices are checked here. `limits`
    tells XMLA_CHECK the range of each index, page and length. `implementations` are the kernels that `plan` can choose
    by name; "reference" is the definition and always there.
    """

    prototype: Callable[..., Any]
    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Callable[[Problem], Spec]]
    plan: Callable[[Problem, Device], Plan]
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    check: Callable[[Problem], None] = lambda problem: None
    limits: Callable[[Problem, Mapping[str, np.ndarray]], Iterable[Limit]] = lambda problem, arrays: ()
    mutates: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ("triton",)
    name: str = field(init=False)
    optional: frozenset[str] = field(init=False)
    mutated: tuple[int, ...] = field(init=False)  # where `mutates` stand among the tensors
    attrs: tuple[Attr, ...] = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.prototype, eval_str=True).parameters
        positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if positional != list(self.tensors):
            raise RuntimeError(f"{self.prototype.__name__} takes {positional}, declared: {list(self.tensors)}")
        object.__setattr__(self, "name", self.prototype.__name__)
        object.__setattr__(self, "optional", frozenset(n for n in positional if parameters[n].default is None))
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
        """The arguments that are paged caches, [pages, entries, bytes or elements]."""
        return [name for name, tensor in self.tensors.items() if tensor.names[-1].endswith("ROW")]

    @property
    def defaults(self) -> dict[str, Any]:
        """Each attribute's default, in order; None for one that has to be given."""
        return {attr.name: attr.default for attr in self.attrs}

    def bind(
        self, specs: Mapping[str, Spec | None], attrs: Mapping[str, Any], implementation: str | None = None,
        whole: Whole | None = None,
    ) -> Problem:  # fmt: skip
        """Check a call against the declaration. Sizes may be symbolic; no value is read."""
        given = {name: spec for name, spec in specs.items() if spec is not None}
        axes: dict[str, int] = {}  # filled below
        problem = Problem(self, given, self.plain_attributes(attrs), axes, implementation, whole)
        first: dict[str, str] = {}  # the argument that each axis has its size of
        for name, tensor in self.tensors.items():
            if name not in given:
                if name not in self.optional:
                    problem.refuse(name, "argument", "missing", "an array")
                continue
            self._check_tensor(problem, name, tensor, given[name], axes, first)
        self.check(problem)
        return problem

    def plain_attributes(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes in Python's own types, in order.

        Raises:
            ArgumentError: One is of another type than declared, or a float that is not finite.
        """
        return {attr.name: attr.plain(self.name, attrs[attr.name]) for attr in self.attrs}

    def _check_tensor(
        self, problem: Problem, name: str, tensor: Tensor, spec: Spec, axes: dict[str, int], first: dict[str, str]
    ) -> None:
        if len(spec.shape) != len(tensor.names):
            problem.refuse(name, "rank", len(spec.shape), f"{len(tensor.names)} ({', '.join(tensor.names)})")
        if spec.dtype not in tensor.dtypes:
            narrowed = " (.int() in torch, .astype('int32') in JAX)" if spec.dtype == "int64" else ""
            problem.refuse(
                name, "dtype", spec.dtype, " or ".join(tensor.dtypes) + narrowed * ("int32" in tensor.dtypes)
            )
        for axis, (label, size) in enumerate(zip(tensor.names, spec.shape, strict=True)):
            if axes.setdefault(label, size) != size:
                expected = f"{axes[label]}, as {problem.called(first[label])}"
                problem.refuse(name, f"axis {label} (axis {axis})", size, expected)
            first.setdefault(label, name)
        if spec.shape[-1] > 1 and spec.stride(-1) != 1:
            problem.refuse(name, f"stride of axis {tensor.names[-1]} (the last)", spec.stride(-1), "1 (dense)")
        other, leading = next(iter(problem.specs.items()))
        if None not in (spec.device, leading.device) and spec.device != leading.device:
            problem.refuse(name, "device", spec.device, f"{leading.device}, as {problem.called(other)}")

    def result_specs(self, problem: Problem) -> dict[str, Spec]:
        return {name: spec(problem) for name, spec in self.outputs.items()}

    def refuse_derivative(self, argument: str, constant: str) -> NoReturn:
        """Raise for an argument that is differentiated; `constant`: what of the framework makes it none."""
        raise UnsupportedError(
            f"{self.name}: {argument} is differentiated, supported: no derivative; {constant} makes it a constant"
        )

    def check_implementation(self, implementation: str | None) -> None:
        choices = (None, *self.implementations, "reference")
        if implementation not in choices:
            raise UnsupportedError(
                f"{self.name}: implementation is {implementation!r}, supported: "
                f"{', '.join(repr(choice) for choice in choices)}"
            )


def plan_call(
    op: Op, specs: tuple[Spec | None, ...], attrs: tuple[Any, ...], device: Device, implementation: str | None = None
) -> tuple[Plan, tuple[Spec, ...]]:
    """Bind and plan, memoised: the plan and the specs of its results, in order.

    `specs` follow `op.tensors`, `attrs` follow `op.attrs`.
    """
    values = op.plain_attributes(dict(zip(op.defaults, attrs, strict=True)))  # the memo takes True for 1
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
        if max(launch.sizes, default=0) > LARGEST_SIZE:
            supported = f"sizes and strides in elements up to {LARGEST_SIZE}"
            raise UnsupportedError(f"{op.name}: {launch.name} takes {max(launch.sizes)}, supported: {supported}")
    if settings.print_plans:
        print(f"{op.name} on {device.name}: {plan}", file=sys.stderr)
    return plan, tuple(op.result_specs(problem).values())


def _check_architecture(problem: Problem, plan: Plan, device: Device) -> None:
    """Refuse a device without the instructions that the plan's arrays need."""
    if device.arch == INTERPRETER.arch:
        return
    packed = [name for name, spec in {**problem.specs, **plan.buffers}.items() if spec.itemsize == 1]
    least, why = (MIN_E4M3_ARCH, f" for the e4m3 of {packed[0]}") if packed else (MIN_ARCH, "")
    if device.arch < least:
        got, supported = (f"{arch // 10}.{arch % 10}" for arch in (device.arch, least))
        raise UnsupportedError(
            f"{problem.op.name}: device {device.name} has compute capability {got}, "
            f"supported: {supported} and later{why}"
        )


def registry() -> dict[str, Op]:
    """Every op by name, found from the folders of `xmla.core.ops`."""
    package = import_module("xmla.core.ops")
    modules = (import_module(f"{package.__name__}.{module.name}") for module in iter_modules(package.__path__))
    return {module.OP.name: module.OP for module in modules}
