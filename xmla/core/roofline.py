"""How long a call takes at least: the bytes and operations of its plan over the device's rates.

Every request is taken to be as long as its block table (or as `keys` says). Entries that several tokens gather count
for each of them, but a pool for no more than it holds: what is read again may come from a cache of the chip. What else
keeps a kernel from its ceiling is left out. docs/roofline.md holds the estimates against times measured on an H200.
"""

from dataclasses import dataclass

from xmla.core.device import PEAKS, Device, Peaks
from xmla.core.op import Problem
from xmla.core.plan import Plan

# What a copy of 2 GiB and matmuls of 8192³ reach of the data sheet's rates on an H200: 4.26 of 4.8 TB/s, 741 of 989 and
# 1433 of 1979 TFLOP/s (benchmarks/results/h200/bench.jsonl).
REACHED = Peaks(bytes_per_s=0.89, bf16_flop_per_s=0.75, fp8_flop_per_s=0.72)
LAUNCH_SECONDS = 0.96e-6  # from one launch of a graph to the next (H200: benchmarks/results/h200/contract.jsonl)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved to and from memory, operations by kind."""

    bytes: float
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0

    def seconds(self, peaks: Peaks) -> float:
        return max(
            self.bytes / (peaks.bytes_per_s * REACHED.bytes_per_s),
            self.bf16_flops / (peaks.bf16_flop_per_s * REACHED.bf16_flop_per_s),
            self.fp8_flops / (peaks.fp8_flop_per_s * REACHED.fp8_flop_per_s),
        )


def estimate(problem: Problem, plan: Plan, device: Device, keys: int | None = None) -> float | None:
    """Seconds that the call takes at least on `device`, launched from a graph; None of a device without known rates."""
    peaks = PEAKS.get(device.name)
    if peaks is None:
        return None
    return sum(work.seconds(peaks) for work in works(problem, keys)) + len(plan.active) * LAUNCH_SECONDS


def works(problem: Problem, keys: int | None = None) -> list[Work]:
    """What a call does, one step after another: logits, selection, attention, and all else that passes once."""
    axes, specs = problem.axes, problem.specs
    results = problem.op.result_specs(problem)
    pools = {name: specs[name] for name in problem.op.pools if name in specs}
    rest = sum(spec.nbytes for name, spec in {**specs, **results}.items() if name not in {*pools, "logits"})
    steps = []
    if "I" in axes and ("N" in axes or "block_table" in specs):
        tokens, dim = axes["T"], axes["D"]
        paged = "N" not in axes
        count = keys or (specs["block_table"].shape[1] * axes["R"] if paged else axes["N"])
        read = count * (axes["B"] if paged else 1) * (dim + 4)
        stored = 4 * tokens * count
        steps.append(Work(read + stored, fp8_flops=2.0 * tokens * count * axes["I"] * dim))
        if "indices" in results:
            steps.append(Work(stored))
    elif "logits" in specs:
        steps.append(Work(specs["logits"].nbytes))
    if "H" in axes and "L+E" in axes and pools:
        q, dims = specs["q"], specs["q"].shape[2] + results["out"].shape[2]
        for name, pool in pools.items():
            slots = specs.get(name.replace("cache", "slots"))
            if slots is not None or not name.startswith("indexer"):
                rows = q.shape[0] * (problem.attrs["k"] if slots is None else slots.shape[1])
                read = min(rows, pool.shape[0] * pool.shape[1]) * pool.shape[2] * pool.itemsize
                steps.append(Work(read, bf16_flops=2.0 * rows * q.shape[1] * dims))
    elif "slots" in specs:
        rest += sum(specs["slots"].shape[0] * pool.shape[2] * pool.itemsize for pool in pools.values())
    return [*steps, Work(rest)]
