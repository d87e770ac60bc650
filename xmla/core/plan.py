"""A plan: the launches of one call, the buffers they need, the results. Plain data that both front-ends run."""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from xmla.core.spec import Spec

# Buffers of a workspace start on multiples of this many bytes, as those of frameworks' allocators do.
ALIGNMENT = 256


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own function is typed for kernels."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n ≥ 1."""
    return 1 << (n - 1).bit_length()


def most_registers(warps: int) -> int:
    """Registers of a thread where one program of so many warps has an SM's 65536 to itself; an instruction names 255.

    As `Launch.max_registers` it keeps ptxas from what it does unasked: spill a few words to fit one more program.
    """
    return min(255, 65536 // (32 * warps))


# What `triton.jit` and `gluon.jit` make of a function; Triton 3.9 types it as the function itself.
Kernel = Any


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: everything but the device arrays.

    A kernel's parameters are, in this order, input pointers, runtime 32-bit sizes, output pointers, constexprs: the one
    order that Triton's launcher and jax-triton both take. `inputs` may repeat a name and may name an array that the
    kernel updates in place. A buffer among the `outputs` of several launches is written by each in part, and may be
    read as those before left it; such ones come first among the outputs.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    inputs: tuple[str, ...]
    sizes: tuple[int, ...]
    outputs: tuple[str, ...]
    constexprs: tuple[tuple[str, Hashable], ...]
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None  # a thread; without, the compiler weighs them against programs an SM itself

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def renamed(self, names: Mapping[str, str]) -> "Launch":
        return replace(
            self,
            inputs=tuple(names.get(n, n) for n in self.inputs),
            outputs=tuple(names.get(n, n) for n in self.outputs),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Launches in order, the buffers to allocate (workspace and results) and the names of the results."""

    launches: tuple[Launch, ...]
    buffers: Mapping[str, Spec] = field(hash=False)
    results: tuple[str, ...]

    def __post_init__(self) -> None:
        written = {name for launch in self.launches for name in launch.outputs}
        if not written <= set(self.buffers):
            raise RuntimeError(f"a plan writes its own buffers: {written} against {list(self.buffers)}")
        shared = self.shared
        for launch in self.launches:
            own = [name not in shared for name in launch.outputs]
            if own != sorted(own):
                raise RuntimeError(f"{launch.name} writes {launch.outputs}: those of {sorted(shared)} come first")
            arguments = len(launch.inputs) + len(launch.sizes) + len(launch.outputs) + len(launch.constexprs)
            if arguments != len(launch.kernel.arg_names):
                raise RuntimeError(f"{launch.name} takes {launch.kernel.arg_names}, the plan passes {arguments}")

    @property
    def shared(self) -> frozenset[str]:
        """The buffers that several launches write."""
        counts = Counter(name for launch in self.launches for name in launch.outputs)
        return frozenset(name for name, count in counts.items() if count > 1)

    @property
    def active(self) -> tuple[Launch, ...]:
        """The launches with work to do; CUDA refuses an empty grid."""
        return tuple(launch for launch in self.launches if prod(launch.grid))

    @property
    def workspace(self) -> dict[str, int]:
        """Where each buffer that is not a result lies in the call's workspace: its first byte, by name."""
        offsets, end = {}, 0
        for name, spec in self.buffers.items():
            if name not in self.results:
                offsets[name] = end
                end += cdiv(spec.nbytes, ALIGNMENT) * ALIGNMENT
        return offsets

    @property
    def workspace_bytes(self) -> int:
        """Device memory that the call needs besides its arguments and results."""
        kept = [spec.nbytes for name, spec in self.buffers.items() if name not in self.results]
        return sum(cdiv(nbytes, ALIGNMENT) * ALIGNMENT for nbytes in kept)

    def __str__(self) -> str:
        lines = [f"{self.workspace_bytes} bytes of workspace"]
        lines += [f"  {name} {spec.dtype}{list(spec.shape)}" for name, spec in self.buffers.items()]
        for launch in self.launches:
            values = ", ".join(f"{name}={value}" for name, value in launch.constexprs)
            lines.append(f"  {launch.name} × {prod(launch.grid)}, {launch.num_warps} warps, {launch.num_stages} stages")
            lines.append(f"    sizes {list(launch.sizes)}; {values}")
        return "\n".join(lines)


def join(steps: list[tuple[Plan, Mapping[str, str]]], results: tuple[str, ...]) -> Plan:
    """One plan that runs `steps` in order; each step's names are first replaced through its mapping."""
    launches: list[Launch] = []
    buffers: dict[str, Spec] = {}
    for plan, names in steps:
        launches += [launch.renamed(names) for launch in plan.launches]
        buffers |= {names.get(name, name): spec for name, spec in plan.buffers.items()}
    return Plan(tuple(launches), buffers, results)
