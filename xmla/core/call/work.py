"""The least bytes and operations of a call, for the roofline and the benchmarks."""

from dataclasses import dataclass

from xmla.core.call.problem import Problem


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved to and from memory, and operations by kind, that a call cannot do without.

    Entries that several tokens gather count once for each token, but a pool never counts more bytes than it holds: an
    entry that is read again may come from a cache of the chip. So may what one launch writes and the next reads, which
    does not count.
    """

    bytes: float
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.bytes + other.bytes, self.bf16_flops + other.bf16_flops, self.fp8_flops + other.fp8_flops
        )  # fmt: skip


def each_array_once(problem: Problem, keys: float | None) -> Work:
    """The work of an op that reads its arguments and writes its results once."""
    return Work(problem.nbytes)


def all_but_pools_once(problem: Problem) -> Work:
    """Everything but the pools of a call: the other arguments read, and the results written, once."""
    return Work(problem.bytes_besides_pools + problem.bytes_of_results)
