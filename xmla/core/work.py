"""The least bytes and operations of a call, for the roofline and the benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved to and from memory, and operations by kind, of one step of a call.

    Entries that several tokens gather count once for each token, but a pool never counts more bytes than it holds: an
    entry that is read again may come from a cache of the chip.
    """

    bytes: float
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
