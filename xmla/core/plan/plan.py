"""A plan: the launches of one call, the buffers they need, the results. Plain data that both front-ends run."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import prod
from typing import Any

from xmla.core.values import Spec, StandIn, round_up

# Buffers of a workspace start on multiples of this many bytes, as in the frameworks' allocators.
ALIGNMENT = 256


def most_registers(warps: int) -> int:
    """Registers per thread if one program of `warps` warps has all 65536 of an SM, at most the 255 of the architecture.

    As `Launch.max_registers` it stops ptxas from spilling registers to raise occupancy.
    """
    return min(255, 65536 // (32 * warps))


# The type of what `triton.jit` and `gluon.jit` return; Triton 3.9 types it as the function itself.
Kernel = Any


@dataclass(frozen=True, slots=True)
class Parameters:
    """A kernel's parameters by kind, each kind in the kernel's order, and names that are no parameters."""

    pointers: tuple[str, ...]
    sizes: tuple[str, ...]
    constexprs: tuple[str, ...]
    unknown: tuple[str, ...]

    @classmethod
    @cache  # plans are made by the thousand, of a few hundred kernels
    def of(cls, names: tuple[str, ...], sizes: frozenset[str], constexprs: frozenset[str]) -> "Parameters":
        values = sizes | constexprs
        pointers = [name for name in names if name not in values]
        wrong = [*sorted(values.difference(names)), *(name for name in pointers if not name.endswith("_ptr"))]
        in_order = (tuple(name for name in names if name in kind) for kind in ({*pointers}, sizes, constexprs))
        return cls(*in_order, unknown=tuple(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants that a kernel takes as one constexpr: a frozen dataclass, whose fields a plan gives by name.

    Fields have names like constexprs, and hold values or other `Constants`. What follows from them are properties. In a
    kernel a size of a block has a constexpr of its own: Triton 3.7 takes no attribute there.
    """

    def by_name(self) -> dict[str, Hashable]:
        """The fields' values; those of a field that holds `Constants` by both names, `SOURCE.PAGE_SIZE`."""
        values: dict[str, Hashable] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Constants):
                values |= {f"{each.name}.{name}": inner for name, inner in value.by_name().items()}
            else:
                values[each.name] = value
        return values

    def replaced(self, name: str, value: Hashable) -> "Constants":
        """These constants with another value for one of them, by the name that it has in `by_name`."""
        name, _, inner = name.partition(".")
        change: dict[str, Any] = {name: getattr(self, name).replaced(inner, value) if inner else value}
        return replace(self, **change)


def constants_by_name(constexprs: Iterable[tuple[str, Hashable]]) -> dict[str, Hashable]:
    """The values of constexprs; of one that holds `Constants` theirs, without its own name."""
    values: dict[str, Hashable] = {}
    for name, value in constexprs:
        values |= value.by_name() if isinstance(value, Constants) else {name: value}
    return values


def constant(constexprs: Mapping[str, Hashable], name: str) -> Hashable:
    """The value of one of `constants_by_name`, that is in no object of an object; None if none has that name."""
    for each, value in constexprs.items():
        if each == name:
            return value
        if isinstance(value, Constants) and name in value.__dataclass_fields__:
            return getattr(value, name)
    return None


def with_constant(constexprs: Mapping[str, Hashable], name: str, value: Hashable) -> dict[str, Hashable]:
    """The constexprs with another value of one, by its name in `constants_by_name`; the same if none has that name."""
    changed = dict(constexprs)
    for each, old in constexprs.items():
        if each == name:
            changed[each] = value
        elif isinstance(old, Constants) and name in old.by_name():
            changed[each] = old.replaced(name, value)
    return changed


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: everything except the device arrays, bound by the names of the kernel's parameters.

    A kernel's parameters are input pointers, runtime 32-bit sizes, output pointers, constexprs: the one order that both
    Triton's launcher and jax-triton take. A pointer `x_ptr` points to the array `x`.

    Attributes:
        outputs: The arrays that the kernel writes and the plan allocates. A cache updated in place is an input. If
            several launches write an array, each writes a part of it and may read what earlier launches wrote; a kernel
            has such arrays first among its outputs.
        arrays: The array of each pointer that does not point to the array of its own name: the call has another name
            for the array, or another array stands in for one that is not given (`Problem.stand_ins`).
        num_ctas: CTAs of a program, a cluster of which the kernel is one. The grid counts programs.
        max_registers: Registers per thread. Without it the compiler weighs registers against occupancy itself.
        spreads: Whether an SM holds no more of its programs than are that SM's share of them. So these do not gather on
            the SMs that are free first, and may start beside any number of an earlier launch's programs.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    outputs: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    constexprs: Mapping[str, Hashable] = field(default_factory=dict, hash=False)
    arrays: Mapping[str, str] = field(default_factory=dict, hash=False)
    num_warps: int = 4
    num_stages: int = 2
    num_ctas: int = 1
    max_registers: int | None = None
    spreads: bool = False
    parameters: Parameters = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = tuple(self.kernel.arg_names), frozenset(self.sizes), frozenset(self.constexprs)
        parameters = Parameters.of(*names)
        object.__setattr__(self, "parameters", parameters)
        outputs = [f"{name}_ptr" for name in self.outputs]
        inputs = [name for name in parameters.pointers if name not in outputs]
        expected = [*inputs, *parameters.sizes, *outputs, *parameters.constexprs]
        wrong = [*parameters.unknown, *(name for name in self.arrays if f"{name}_ptr" not in parameters.pointers)]
        if wrong or self.kernel.arg_names != expected:
            taken = f"{self.name} takes {self.kernel.arg_names}"
            raise RuntimeError(f"{taken}, the plan gives {expected}; unknown: {wrong}")
        for pointer, array in self.arrays.items():
            if pointer != array and pointer in self.arrays.values():
                raise RuntimeError(f"{self.name}: {pointer}_ptr gets {array}, and another pointer gets {pointer}")

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is asked for besides constants, by name."""
        return {name: getattr(self, name) for name in ("num_warps", "num_stages", "num_ctas", "max_registers")}

    @property
    def size(self) -> str:
        """The size of a program, in words."""
        return f"{self.num_warps} warps" if self.num_ctas == 1 else f"{self.num_ctas} CTAs of {self.num_warps} warps"

    @property
    def pointers(self) -> dict[str, str]:
        """The array of each pointer, by parameter, in the kernel's order."""
        bare = {pointer: pointer.removesuffix("_ptr") for pointer in self.parameters.pointers}
        return {pointer: self.arrays.get(name, name) for pointer, name in bare.items()}

    @property
    def reads(self) -> tuple[str, ...]:
        """The arrays of the input pointers, in the kernel's order; one may occur several times."""
        written = len(self.outputs)
        arrays = tuple(self.pointers.values())
        return arrays[: len(arrays) - written]

    @property
    def writes(self) -> tuple[str, ...]:
        """The arrays of the output pointers, in the kernel's order."""
        return tuple(self.arrays.get(name, name) for name in self.outputs)

    @property
    def size_values(self) -> tuple[int, ...]:
        """The runtime sizes, in the kernel's order."""
        return tuple(self.sizes[name] for name in self.parameters.sizes)

    @property
    def constexpr_values(self) -> tuple[tuple[str, Hashable], ...]:
        """The constexprs with their names, in the kernel's order."""
        return tuple((name, self.constexprs[name]) for name in self.parameters.constexprs)

    @property
    def constants(self) -> dict[str, Hashable]:
        """The values that the kernel is compiled for, by name, in the kernel's order."""
        return constants_by_name(self.constexpr_values)

    @property
    def waits(self) -> bool:
        """Whether its kernel waits for the launches before it, so that it may start early (core/lang/launches.py)."""
        return bool(constant(self.constexprs, "OVERLAP_LIMIT"))

    def starts_early(self, *, first: bool) -> bool:
        """Whether it may start before what is before it has ended: the `first` of a call if its kernel is PATIENT."""
        return self.waits and (not first or bool(constant(self.constexprs, "PATIENT")))

    def in_turn(self) -> "Launch":
        """A copy of the launch that starts when the one before it has ended."""
        return self.overlapped(0)

    def overlapped(self, limit: int) -> "Launch":
        """A copy of the launch with another OVERLAP_LIMIT."""
        return replace(self, constexprs=with_constant(self.constexprs, "OVERLAP_LIMIT", limit))

    def with_sizes(self, **sizes: int) -> "Launch":
        """A copy of the launch with other runtime sizes."""
        return replace(self, sizes={**self.sizes, **sizes})

    def renamed(self, names: Mapping[str, str]) -> "Launch":
        """A copy of the launch with other names for its arrays."""
        bound = {pointer.removesuffix("_ptr"): renamed(array, names) for pointer, array in self.pointers.items()}
        return replace(self, arrays={name: array for name, array in bound.items() if name != array})


def renamed(array: str, names: Mapping[str, str]) -> str:
    """The array's name among `names`; a stand-in stays one."""
    return type(array)(names.get(array, array))


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of an op's implementations a call takes.

    Attributes:
        implementation: Its own name.
        passed_over: Those that are better where they serve a call: name, what this call has, and what is supported.
    """

    op: str
    implementation: str
    passed_over: tuple[tuple[str, str, str], ...] = ()

    def __str__(self) -> str:
        skipped = [f"  skipped: {name}, which serves {what}; here {got}" for name, got, what in self.passed_over]
        return "\n".join([f"{self.op} by {self.implementation}", *skipped])


@dataclass(frozen=True, slots=True)
class Plan:
    """Launches in order, the buffers to allocate (workspace and results) and the names of the results.

    Attributes:
        choices: Of each op in it that has several implementations: the one whose launches these are, and why.
        left_out: Steps that are not run, since nothing reads their results.
    """

    launches: tuple[Launch, ...]
    buffers: Mapping[str, Spec] = field(hash=False)
    results: tuple[str, ...]
    choices: tuple[Choice, ...] = ()
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        writers = self._writers
        if not self.buffers.keys() >= writers.keys():
            raise RuntimeError(f"a plan writes its own buffers: {set(writers)} against {list(self.buffers)}")
        if len(writers) == writers.total():
            return
        for launch in self.launches:
            own = [writers[name] == 1 for name in launch.writes]
            if own != sorted(own):
                raise RuntimeError(f"{launch.name} writes {launch.writes}: those of {sorted(self.shared)} come first")

    @property
    def shared(self) -> frozenset[str]:
        """The buffers that several launches write."""
        return frozenset(name for name, count in self._writers.items() if count > 1)

    @property
    def _writers(self) -> Counter[str]:
        """How many launches write each buffer."""
        return Counter(name for launch in self.launches for name in launch.writes)

    @property
    def active(self) -> tuple[Launch, ...]:
        """The launches with work to do; CUDA refuses an empty grid."""
        return tuple(launch for launch in self.launches if prod(launch.grid))

    @property
    def workspace(self) -> dict[str, int]:
        """The offset in the call's workspace, in bytes, of each buffer that is not a result, by name."""
        offsets, end = {}, 0
        for name, spec in self.buffers.items():
            if name not in self.results:
                offsets[name] = end
                end += round_up(spec.nbytes, ALIGNMENT)
        return offsets

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that the call needs besides its arguments and results."""
        kept = [spec.nbytes for name, spec in self.buffers.items() if name not in self.results]
        return sum(round_up(nbytes, ALIGNMENT) for nbytes in kept)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The plan's choices, with a line for each implementation that was skipped, and the steps that are left out."""
        return (*map(str, self.choices), *(f"{step} is left out: nothing reads its results" for step in self.left_out))

    def __str__(self) -> str:
        lines = [
            f"{self.workspace_bytes} bytes of workspace",
            *(f"  {line}" for remark in self.remarks for line in remark.splitlines()),
        ]
        lines += [f"  {name} {spec.dtype}{list(spec.shape)}" for name, spec in self.buffers.items()]
        for launch in self.launches:
            lines.append(f"  {launch.name} × {prod(launch.grid)}, {launch.size}, {launch.num_stages} stages")
            read = {pointer: name for pointer, name in launch.pointers.items() if not isinstance(name, StandIn)}
            facts = {"arrays": read, "sizes": launch.sizes, "constants": launch.constants}
            for label, pairs in facts.items():
                lines.append(f"    {label}: {', '.join(f'{name}={value}' for name, value in pairs.items())}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Part:
    """One step of a larger plan.

    Attributes:
        names: The whole's names of the arrays that the step shares with others.
        updates: The whole's arrays that it updates in place.
    """

    label: str
    plan: Plan
    names: Mapping[str, str]
    updates: frozenset[str] = frozenset()

    def renamed(self) -> dict[str, str]:
        """Each buffer's name in the whole; the step's label distinguishes its private buffers."""
        return {name: self.names.get(name, f"{self.label}.{name}") for name in self.plan.buffers}


def join(parts: Sequence[Part], results: tuple[str, ...]) -> Plan:
    """One plan that runs `parts` in order, but for those whose results nothing reads.

    A selection of all keys reads no logits, for example.
    """
    launches: list[Launch] = []
    buffers: dict[str, Spec] = {}
    needed, run = {*results}, []
    for part in reversed(parts):
        names = {**part.names, **part.renamed()}
        own = {names[name]: spec for name, spec in part.plan.buffers.items()}
        if part.updates or not needed.isdisjoint(own):
            renamed = [launch.renamed(names) for launch in part.plan.launches]
            needed.update(name for launch in renamed for name in launch.reads)
            launches, buffers, run = renamed + launches, own | buffers, [part, *run]
    left_out = [part.label for part in parts if part not in run]
    left_out += [label for part in run for label in part.plan.left_out]
    return Plan(tuple(launches), buffers, results, all_choices(part.plan for part in run), tuple(left_out))


def all_choices(plans: Iterable[Plan]) -> tuple[Choice, ...]:
    """The choices of several plans, each once."""
    return tuple(dict.fromkeys(choice for plan in plans for choice in plan.choices))
