"""The least time of a call: the bytes and operations that its op declares (`Op.work`) over the device's rates.

The model ignores everything else that keeps a kernel from its ceiling. docs/roofline.md compares the estimates with
times measured on an H200.
"""

from xmla.core.call import Work
from xmla.core.plan.plan import Plan
from xmla.core.values import PEAKS, Device, Peaks

# Shares of the data sheet's rates that a copy of 2 GiB and matmuls of 8192³ reach on an H200: 4.26 of 4.8 TB/s, 741 of
# 989 and 1433 of 1979 TFLOP/s (benchmarks/results/h200/bench.jsonl).
REACHED = Peaks(bytes_per_s=0.89, bf16_flop_per_s=0.75, fp8_flop_per_s=0.72)
LAUNCH_SECONDS = 0.96e-6  # from one launch of a graph to the next on an H200 (benchmarks/launch_time.py)


def seconds_of(work: Work, peaks: Peaks) -> float:
    """The time to move the bytes and compute the operations, overlapped."""
    return max(
        work.bytes / (peaks.bytes_per_s * REACHED.bytes_per_s),
        work.bf16_flops / (peaks.bf16_flop_per_s * REACHED.bf16_flop_per_s),
        work.fp8_flops / (peaks.fp8_flop_per_s * REACHED.fp8_flop_per_s),
    )


def estimate(work: Work, plan: Plan, device: Device) -> float | None:
    """The least seconds of a call's `work` on `device`, launched from a graph; None for one without known rates."""
    peaks = PEAKS.get(device.name)
    if peaks is None:
        return None
    return seconds_of(work, peaks) + len(plan.active) * LAUNCH_SECONDS
