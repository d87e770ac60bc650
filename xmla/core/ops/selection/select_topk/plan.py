import math
from dataclasses import dataclass
from typing import Any

from xmla.core.call import Problem
from xmla.core.ops.selection.select_topk.gluon_sm90.plan import IMPLEMENTATION as GLUON_ROWS
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.plan import IMPLEMENTATION as GLUON_CLUSTERS
from xmla.core.ops.selection.select_topk.kernels import (
    topk_candidates_kernel,
    topk_select_kernel,
    topk_whole_kernel,
)
from xmla.core.ops.selection.select_topk.sample import SLACK_PART, Sample
from xmla.core.ops.selection.select_topk.tile import COLUMNS_A_WARP
from xmla.core.plan import Condition, Constants, Implementation, Launch, Plan, most_registers, overlap_limit
from xmla.core.values import Device, Spec, arithmetic, larger, next_power_of_2, up_to

MAX_CAPACITY = 16384  # candidates of one row, in registers
MAX_SEGMENTS = 16  # of a row: a candidate's place is found from the counts of all of them
# Of rows that do not fill the machine, whose time is that of barriers and latencies:
SIGMAS_OF_FEW = 4.5  # fewer than `SIGMAS`, so that the candidates of 1048576 columns fit
MAX_SEGMENTS_OF_PIECES = 64
MAX_PIECES_CAPACITY = 8192  # candidates and what fills their pieces up, in registers with their columns
FEWEST_LANES = 1024
PIECE = 8  # candidates: an empty place costs as much as a candidate, and each piece costs one comparison a segment
TRIALS = (8, 4)  # of a step, for the sample's threshold and for the candidates'
WARPS = 8  # of a segment's program


@dataclass(frozen=True, slots=True)
class Config:
    """How a row is searched.

    `segments` programs per row keep the elements that reach the `rank`-th largest of a sample (one of `step` elements,
    folded onto `lanes`), at most `capacity` of the row. There are no segments if k is too large for that. Candidates of
    a segment fill pieces of `piece`, if that is not 0. A step of a search has `trials[0]` and `trials[1]` trials. With
    `early` a segment's first tile is loaded before the sample.
    """

    segments: int
    capacity: int
    rank: int
    lanes: int
    step: int
    warps: int
    piece: int = 0
    trials: tuple[int, int] = (2, 2)
    early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments(Constants):
    """Constants of both kernels: how the candidates of a row are stored, and the loads of a program."""

    HAS_STARTS: bool
    SEGMENTS: int  # of a row; 0: there are no candidates, every row is searched in place
    CAPACITY: int  # of a segment, in candidates
    PIECE: int  # a segment's candidates are filled up to whole pieces; 0: they are not
    UNIT: int  # of what the kernel loads or stores, `Spec.vector`
    TRIALS: int  # of a step of a search
    WARPS: int
    OVERLAP_LIMIT: int  # core/lang/launches.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates(Segments):
    """Constants of the kernel of candidates."""

    LANES: int
    STEP: int
    EARLY: bool  # the first tile is loaded before the sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Segments):
    """Constants of the kernel that selects among them."""

    K: int  # k, compiled in; 0: it is not
    TILE: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRows(Constants):
    """Constants of the kernel of rows that are selected as a whole."""

    HAS_STARTS: bool
    UNIT: int  # of what it stores, `Spec.vector`
    TILE: int
    OVERLAP_LIMIT: int  # core/lang/launches.py


def configure(rows: int, columns: int, k: int, device: Device) -> Config:
    if rows <= device.num_sms:
        config = configure_few(rows, columns, k, device)
        if config is not None:
            return config
    sample = Sample.of(columns, k)
    if sample.capacity > MAX_CAPACITY:
        return Config(0, 0, 0, 0, 0, 0)
    # Four warps per program if rows fill the machine. Otherwise eight, and rows are split until there are two programs
    # per SM, as long as each segment keeps a tile: 227 against 231 µs at 2048 × 65536, 19.5 against 20.9 at 64 × 65536
    # (H200, 2026-11-22).
    if rows > device.num_sms:
        warps = up_to(4096, sample.lanes, 4, 8)  # 8192 lanes spill with 4
        return Config(1, sample.capacity, sample.rank, sample.lanes, sample.step, warps)
    segments = segments_of(rows, columns, MAX_SEGMENTS, device)
    return Config(segments, sample.capacity, sample.rank, sample.lanes, sample.step, WARPS)


@arithmetic
def segments_of(rows: int, columns: int, most: int, device: Device) -> int:
    """Segments of a row: as many as give two programs per SM and leave each a tile; at most `most`."""
    most = min(most, 2 * device.num_sms // max(rows, 1))
    segments = 1
    while 2 * segments <= most and columns >= 2 * segments * WARPS * COLUMNS_A_WARP.value:
        segments *= 2
    return segments


def configure_few(rows: int, columns: int, k: int, device: Device) -> Config | None:
    """The configuration for rows that do not fill the machine; None if too many candidates are expected.

    Lanes are so few that a step of their search is short. Several of the largest then share one, so that the rank is
    that of a number of lanes: each is hit with the same probability, of which the lanes are that many trials.
    """
    step = larger(8, next_power_of_2(columns // 16384 + 1) // 2)
    lanes = lanes_of_few(k, step)
    rank = rank_of_few(k, step, lanes)
    segments = segments_of(rows, columns, MAX_SEGMENTS_OF_PIECES, device)
    capacity = larger(1024, next_power_of_2(places_of_few(step, lanes, rank, segments)))
    if capacity > MAX_PIECES_CAPACITY:
        return None
    return Config(segments, capacity, rank, lanes, step, WARPS, PIECE, TRIALS, True)


@arithmetic
def lanes_of_few(k: int, step: int) -> int:
    lanes = FEWEST_LANES
    while rank_of_few(k, step, lanes) > 0.4 * lanes:
        lanes *= 2
    return lanes


@arithmetic
def rank_of_few(k: int, step: int, lanes: int) -> int:
    hit = -math.expm1(-k / step / lanes)  # a lane has one of the k largest
    return math.ceil(lanes * hit + SIGMAS_OF_FEW * math.sqrt(lanes * hit * (1 - hit)) + SIGMAS_OF_FEW**2 / 6)


@arithmetic
def places_of_few(step: int, lanes: int, rank: int, segments: int) -> int:
    """Candidates of a row that reach the rank, and what fills its segments' pieces up."""
    # The greatest probability that may leave so few lanes hit, by Wilson's interval.
    part, square = (rank + rank // SLACK_PART.value) / lanes, SIGMAS_OF_FEW**2 / lanes
    error = math.sqrt(square * part * (1 - part) + square * square / 4)
    folded = -lanes * math.log1p(-(part + square / 2 + error) / (1 + square))
    return math.ceil(step * folded + segments * PIECE / 2)


def plan(problem: Problem, device: Device) -> Plan:
    rows, columns, k = problem["T"], problem["N"], problem.attrs.k
    config = configure(rows, columns, k, device)
    shared: dict[str, Any] = {
        "HAS_STARTS": problem.has("starts"),
        "SEGMENTS": config.segments,
        "CAPACITY": config.capacity,
        "PIECE": config.piece,
    }
    arrays = problem.stand_ins(starts="ends")
    logits = problem.specs["logits"]
    sizes = {"first_row": 0, "num_columns": columns, "row_stride": logits.stride(0), "k": k}
    results = problem.results
    unit = results["indices"].vector(k)
    rows_unit = 1 if problem.has("starts") else logits.vector(logits.stride(0))
    if config.segments == 0:
        select = Launch(
            topk_select_kernel,
            grid=(rows,),
            outputs=("indices",),
            arrays={**arrays, "candidates": "logits", "counts": "ends", "thresholds": "logits"},
            sizes=sizes,
            constexprs={
                "C": Selection(
                    **shared, UNIT=unit, TRIALS=2, WARPS=16, K=0, TILE=4096, OVERLAP_LIMIT=device.overlap_limit
                )
            },
            num_warps=16,
            num_stages=3,
        )
        return Plan((select,), results, ("indices",))
    workspace = {
        "candidates": Spec((rows, config.segments, config.capacity, 2), "int32"),
        "counts": Spec((rows, config.segments), "int32"),
        "thresholds": Spec((rows,), "float32"),
    }
    # Six programs per SM of one kernel and four of the other: 227 µs at 2048 × 65536; five and four: 236 (H200,
    # 2026-11-22).
    many = device.arch == 90 and rows > device.num_sms and config.warps == 4 and config.capacity <= 4096
    candidates = Launch(
        topk_candidates_kernel,
        grid=(rows * config.segments,),
        outputs=tuple(workspace),
        arrays=arrays,
        sizes={**sizes, "sample_rank": config.rank},
        constexprs={
            "C": Candidates(
                **shared,
                UNIT=rows_unit,
                TRIALS=config.trials[0],
                WARPS=config.warps,
                OVERLAP_LIMIT=overlap_limit(problem, device, "starts", "ends"),
                LANES=config.lanes,
                STEP=config.step,
                EARLY=config.early,
            )
        },
        num_warps=config.warps,
        num_stages=1,
        max_registers=80 if many else None,
    )
    warps = choosing_warps(config.capacity, rows, device)
    select = Launch(
        topk_select_kernel,
        grid=(rows,),
        outputs=("indices",),
        arrays=arrays,
        sizes=sizes,
        constexprs={
            "C": Selection(
                **shared,
                UNIT=unit,
                TRIALS=config.trials[1],
                WARPS=warps,
                OVERLAP_LIMIT=device.overlap_limit,
                # Where registers are scarce k is compiled in: as a size it would take 40 bytes more of spills.
                K=k if many else 0,
                TILE=256 * warps,
            )
        },
        num_warps=warps,
        num_stages=3,
        max_registers=128 if many else most_registers(warps),
    )
    return Plan((candidates, select), {**workspace, **results}, ("indices",))


def plan_whole(problem: Problem, device: Device) -> Plan:
    """The plan of rows of at most k columns: none of them is read."""
    k, results = problem.attrs.k, problem.results
    whole = Launch(
        topk_whole_kernel,
        grid=(problem["T"],),
        outputs=("indices",),
        arrays=problem.stand_ins(starts="ends"),
        sizes={"first_row": 0, "num_columns": problem["N"], "k": k},
        constexprs={
            "C": WholeRows(
                HAS_STARTS=problem.has("starts"),
                UNIT=results["indices"].vector(k),
                TILE=2048,
                OVERLAP_LIMIT=device.overlap_limit,
            )
        },
    )
    return Plan((whole,), results, ("indices",))


def _longer(problem: Problem, _: Device) -> str | None:
    return None if problem["N"] <= problem.attrs.k else f"with {problem['N']} columns and k of {problem.attrs.k}"


IMPLEMENTATIONS = (
    Implementation("whole_rows", plan_whole, (Condition("rows of at most k columns", _longer),)),
    GLUON_CLUSTERS,
    GLUON_ROWS,
    Implementation("triton", plan),
)


@arithmetic
def choosing_warps(candidates: int, rows: int, device: Device) -> int:
    """Warps of a program that holds the candidates of a row in registers: more if few rows can hide latency."""
    elements = 512 if rows <= device.num_sms else 1024  # a warp
    return max(4, min(16, candidates // elements))
