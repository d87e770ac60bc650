"""A call of an op: its arrays as they are declared and as they are given, and how an error of it reads."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import numpy as np

from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats import Format
from xmla.core.values import Agreement, Attributes, Spec, StandIn

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


# Axes whose sizes change from call to call: tokens, requests, pages, keys, selected keys and blocks, positions, places.
# The others are a model's: dims, heads, entries per page, ranks.
GROWING = frozenset({
    "T", "B", "B+1", "M", "STATE_M", "K", "BLOCKS", "EXTRA_K", "N", "S", "COLUMNS", "P", "EXTRA_P", "SOURCE_P",
    "STATE_P", "PLACES",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument: axes by name (equal names have equal sizes across the arguments) and the dtypes accepted.

    Attributes:
        index_of: Of index tensors: the axes that the values index, flattened. Values out of range name nothing.
        bound_of: Of integers that bound a range: the axis to whose size they are clamped.
        format: Of paged caches: a function that finds the format of the argument of that name, or refuses it.
        format_attribute: The attribute that may name that format.
        pool: Of keys one after the other: they are a pool, as paged caches are.
        distinct: Of index tensors: values in range must differ, since what they name is written.
    """

    axes: str
    dtypes: tuple[str, ...]
    index_of: str = ""
    bound_of: str = ""
    format: "Callable[[Problem, str], Format] | None" = None
    format_attribute: str = ""
    pool: bool = False
    distinct: bool = False

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
        sum_over: The axes of arguments that it is a sum over: those of calls with parts of such an axis add up to it.
    """

    axes: str
    dtype: "str | Callable[[Problem], str]"
    sizes: "Mapping[str, Callable[[Problem], int]]" = field(default_factory=dict)
    agreement: Agreement | None = None
    partial: bool = False
    sum_over: str = ""

    @property
    def names(self) -> list[str]:
        return self.axes.split()

    def spec(self, problem: "Problem") -> Spec:
        shape = (self.sizes[name](problem) if name in self.sizes else problem[name] for name in self.names)
        return Spec(tuple(shape), self.dtype if isinstance(self.dtype, str) else self.dtype(problem))

    def written(self, reference: np.ndarray) -> np.ndarray | None:
        """Where the op writes, according to the reference; None: everywhere."""
        return ~np.isnan(reference) if self.partial else None


def pools_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """The arguments of whose entries a call reads or writes those that others name."""
    return [name for name, tensor in tensors.items() if tensor.pool or tensor.format is not None]


@dataclass(frozen=True, slots=True)
class CalledAs:
    """The op that the caller called, for errors of a call that is a step of it: there `a` is called `names[a]`."""

    op: str
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Problem:
    """A call that passed the declaration's checks: all that rules, plans and work are computed from.

    Attributes:
        op: The op's name.
        tensors: Its arguments as they are declared.
        specs: Those that are given.
        axes: The size of each axis.
        formats: The format of each paged cache that is given.
        results: In order.
        implementation: The one asked for by name.
        called_as: Of a call that is a step of another op's.
        written: The arguments that earlier launches of the same plan write.
    """

    op: str
    tensors: Mapping[str, Tensor]
    specs: Mapping[str, Spec]
    attrs: Attributes
    axes: Mapping[str, int]
    formats: Mapping[str, Any]
    results: Mapping[str, Spec]
    implementation: str | None = None
    called_as: CalledAs | None = None
    written: frozenset[str] = frozenset()

    def __getitem__(self, axis: str) -> int:
        return self.axes[axis]

    def has(self, argument: str) -> bool:
        return argument in self.specs

    @property
    def pools(self) -> list[str]:
        """The pools among the arguments that are given."""
        return [name for name in pools_of(self.tensors) if name in self.specs]

    @property
    def bytes_besides_pools(self) -> int:
        """Bytes of the other arguments that are given."""
        pools = self.pools
        return sum(spec.nbytes for name, spec in self.specs.items() if name not in pools)

    @property
    def bytes_of_results(self) -> int:
        return sum(spec.nbytes for spec in self.results.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the arguments that are given, and of the results."""
        return sum(spec.nbytes for spec in self.specs.values()) + self.bytes_of_results

    def stand_ins(self, **stand_ins: str) -> dict[str, str]:
        """The arrays whose pointers kernels get, and never read, instead of optional arguments that are not given."""
        return {argument: StandIn(array) for argument, array in stand_ins.items() if argument not in self.specs}

    def called(self, argument: str) -> str:
        """The caller's name of an argument."""
        return argument if self.called_as is None else self.called_as.names.get(argument, argument)

    @property
    def called_op(self) -> str:
        """The op that the caller called."""
        return self.op if self.called_as is None else self.called_as.op

    def page_size(self, cache: str = "cache") -> int:
        """Entries of a page, by which kernels divide: 1 where pages have none, since then no slot names an entry."""
        return max(self.specs[cache].shape[1], 1)

    def require_count(self, attribute: str, least: int = 1) -> None:
        """An attribute that counts something is at least `least`, and no more than kernels count."""
        value = getattr(self.attrs, attribute)
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
        return f"{self.called_op}: {self.called(argument)}"


@dataclass(frozen=True, slots=True)
class Limit:
    """Elements of `argument` must lie in [low, high]; at `where` alone, if given."""

    argument: str
    low: int
    high: int
    where: np.ndarray | None = None

    def violated(self, array: np.ndarray) -> np.ndarray:
        """Which elements of the argument lie outside."""
        outside = (array < self.low) | (array > self.high)
        return outside if self.where is None else outside & self.where


def declared_limits(problem: Problem, arrays: Arrays) -> Iterable[Limit]:
    """The range of each integer that indexes or bounds axes, by its declaration; an index may be −1."""
    for name, tensor in problem.tensors.items():
        if name in arrays and tensor.index_of:
            yield Limit(name, -1, prod(problem[axis] for axis in tensor.index_of.split()) - 1)
        elif name in arrays and tensor.bound_of:
            yield Limit(name, 0, problem[tensor.bound_of])
