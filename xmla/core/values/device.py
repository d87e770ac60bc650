"""Device facts as plain values: plans are made and kernels compiled on machines without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from xmla.core.errors import ArgumentError, did_you_mean

# Shared memory that one CTA may use, in bytes, by compute capability (CUDA programming guide, table of technical
# specifications per compute capability; 10.7, which it lacks: CUDA 13.4's cuda_occupancy.h, which tells no 10.x apart).
SMEM_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10,
              107: 227 << 10, 110: 227 << 10, 120: 99 << 10, 121: 99 << 10}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the planner sees it; `arch` is the compute capability times ten (90: Hopper; 0: the interpreter)."""

    name: str
    arch: int
    num_sms: int
    smem_bytes: int

    @classmethod
    def of(cls, name: str, arch: int, num_sms: int) -> "Device":
        """A device as its driver describes it; its shared memory is that of its architecture."""
        return cls(name, arch, num_sms, SMEM_BYTES.get(arch, 99 << 10))

    @property
    def overlap_limit(self) -> int:
        """The most programs of a launch that the next one may overlap; 0 where launches take turns.

        Half of an H200's SMs, where it was measured, so that GPUs with other numbers of SMs share the kernels.
        Programmatic dependent launch starts with Hopper. See core/lang/launches.py.
        """
        return 66 if self.arch >= 90 else 0

    def hides_bytes(self, rows: int) -> bool:
        """Whether kernels hide that operands of products of so many rows were bytes (`lang.numbers.hidden`).

        Products by mma.sync do: not those of 64 rows on Hopper and where there is tensor memory. Hopper's others were
        measured without.
        """
        return self.arch >= MIN_ARCH and self.arch != 90 and not (self.has_tensor_memory and rows >= 64)

    @property
    def converts_e4m3(self) -> bool:
        """Whether it has instructions for e4m3; without them kernels convert in integers (`lang.numbers`)."""
        return self.arch >= MIN_E4M3_ARCH or self.arch == INTERPRETER.arch

    @property
    def has_tensor_memory(self) -> bool:
        """Whether accumulators of matrix products are in tensor memory instead of registers (tcgen05)."""
        return self.arch // 10 in (10, 11)


H100 = Device.of("NVIDIA H100", 90, 132)
H200 = Device.of("NVIDIA H200", 90, 132)
B200 = Device.of("NVIDIA B200", 100, 148)
B300 = Device.of("NVIDIA B300", 103, 148)
RTX_PRO_6000 = Device.of("NVIDIA RTX PRO 6000 Blackwell", 120, 188)
GB10 = Device.of("NVIDIA GB10", 121, 48)
# Further devices: every op that the architecture supports compiles, but no tile is chosen for them.
L40S = Device.of("NVIDIA L40S", 89, 142)
A100 = Device.of("NVIDIA A100", 80, 108)
# Triton's interpreter: few programs, since each costs milliseconds of Python.
INTERPRETER = Device("Triton interpreter", 0, 2, 227 << 10)

# Tensor cores for bf16 start with Ampere, products and conversions of e4m3 with Ada.
MIN_ARCH = 80
MIN_E4M3_ARCH = 89

KNOWN_DEVICES = (H100, H200, B200, B300, RTX_PRO_6000, GB10, L40S, A100)


@dataclass(frozen=True, slots=True)
class Peaks:
    """A device's peak rates by its data sheet, without sparsity."""

    bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float


# NVIDIA's data sheets of the H100 and H200 SXM, the A100 80 GB SXM (without fp8) and the L40S; B200 and B300: Blackwell
# technical brief, HGX, a GPU; RTX PRO 6000 Blackwell: 1792 GB/s and 4000 TOPS of sparse fp4, of which a quarter is
# dense fp8 and an eighth dense bf16; GB10 likewise, 273 GB/s and 1000 TOPS (DGX Spark).
PEAKS = {
    H100.name: Peaks(3.35e12, 989e12, 1979e12),
    H200.name: Peaks(4.8e12, 989e12, 1979e12),
    B200.name: Peaks(7.7e12, 2250e12, 4500e12),
    B300.name: Peaks(8.0e12, 2250e12, 4500e12),
    RTX_PRO_6000.name: Peaks(1.792e12, 500e12, 1000e12),
    GB10.name: Peaks(0.273e12, 125e12, 250e12),
    L40S.name: Peaks(0.864e12, 362e12, 733e12),
    A100.name: Peaks(2.039e12, 312e12, 312e12),
}


def find_device(name: str) -> Device:
    """The known device of that name, whole, in any case: "NVIDIA RTX PRO 6000 Blackwell", or "RTX PRO 6000".

    A part of a name is that of another GPU: "H20", "L40", "A10".

    Raises:
        ArgumentError: There is none.
    """
    short = {device: device.name.removeprefix("NVIDIA ").removesuffix(" Blackwell") for device in KNOWN_DEVICES}
    for device in KNOWN_DEVICES:
        names = device.name, device.name.removeprefix("NVIDIA "), short[device]
        if name.lower() in [each.lower() for each in names]:
            return device
    known = short.values()
    raise ArgumentError(f"device is {name!r}, expected one of {', '.join(known)}{did_you_mean(name, known)}")


_assumed: ContextVar[Device | None] = ContextVar("xmla_assumed_device", default=None)
# Contexts that `assume_device` enters too, for a framework that keeps what it traced.
entered_with: list[Callable[[Device], AbstractContextManager[Any]]] = []


@contextmanager
def assume_device(device: Device) -> Iterator[None]:
    """Plan and lower for `device` inside the block, whatever hardware is present (JAX lowering, `xmla plan`)."""
    token = _assumed.set(device)
    try:
        with ExitStack() as stack:
            for context in entered_with:
                stack.enter_context(context(device))
            yield
    finally:
        _assumed.reset(token)


def assumed_device() -> Device | None:
    return _assumed.get()
