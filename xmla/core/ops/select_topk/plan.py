from dataclasses import dataclass

from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops.select_topk.kernels import topk_candidates_kernel, topk_select_kernel
from xmla.core.plan import Launch, Plan, next_power_of_2
from xmla.core.spec import Spec
from xmla.core.tuned import tuned

MAX_LANES = 16384  # running maxima or candidates of one program, in registers


@dataclass(frozen=True, slots=True)
class Config:
    """How a row is searched: `segments` programs a row with `lanes` candidates each; none for very large k."""

    segments: int
    lanes: int
    tile: int


def configure(rows: int, columns: int, k: int, device: Device) -> Config:
    lanes = max(1024, next_power_of_2(2 * k))
    if lanes > MAX_LANES:
        return Config(0, lanes, 4096)
    # Split rows until every SM has two programs, as far as segments stay several times their candidates.
    segments = 1
    while (
        rows * segments < 2 * device.num_sms and columns >= 8 * lanes * segments and 2 * segments * lanes <= MAX_LANES
    ):
        segments *= 2
    # Tiles of 2048, 4 warps: best of those tried on an H200 at 2048 × 65536, 2026-11-21.
    return Config(segments, lanes, 2048)


def count_warps(elements: int) -> int:
    """Warps for a program that holds `elements` in registers."""
    return max(4, min(16, elements // 512))


def plan(problem: Problem, device: Device) -> Plan:
    rows, columns, k = problem["T"], problem["N"], problem.attrs["k"]
    key = f"rows{next_power_of_2(max(rows, 1))}-columns{next_power_of_2(max(columns, 1))}-k{k}"
    config = tuned("select_topk", device, key, configure(rows, columns, k, device))
    starts = problem.has("starts")
    stride = problem.specs["logits"].stride(0)
    # A stride passed in units tells the compiler that rows stay aligned, which a runtime integer would not.
    unit = 4 if stride % 4 == 0 and not starts else 1
    shared = (
        ("STRIDE_UNIT", unit),
        ("HAS_STARTS", starts),
        ("K", k),
        ("SEGMENTS", config.segments),
        ("LANES", config.lanes),
        ("TILE", config.tile),
    )
    row_inputs = ("logits", problem.either("starts", "ends"), "ends")
    sizes = (columns, stride // unit)
    results = problem.op.result_specs(problem)
    if config.segments == 0:
        select = Launch(
            topk_select_kernel,
            grid=(rows,),
            inputs=(*row_inputs, "logits", "logits", "ends"),
            sizes=sizes,
            outputs=("indices",),
            constexprs=shared,
            num_warps=16,
            num_stages=3,
        )
        return Plan((select,), results, ("indices",))
    space = (rows, config.segments, config.lanes)
    workspace = {
        "candidates": Spec(space, "float32"),
        "candidate_columns": Spec(space, "int32"),
        "counts": Spec(space[:2], "int32"),
    }
    candidates = Launch(
        topk_candidates_kernel,
        grid=(rows * config.segments,),
        inputs=row_inputs,
        sizes=sizes,
        outputs=tuple(workspace),
        constexprs=shared,
        num_warps=max(4, config.lanes // 1024),
        num_stages=3,
    )
    select = Launch(
        topk_select_kernel,
        grid=(rows,),
        inputs=(*row_inputs, *workspace),
        sizes=sizes,
        outputs=("indices",),
        constexprs=shared,
        num_warps=count_warps(config.segments * config.lanes),
        num_stages=3,
    )
    return Plan((candidates, select), workspace | results, ("indices",))
