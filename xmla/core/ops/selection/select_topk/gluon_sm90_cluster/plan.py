from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.selection.select_topk.gluon_sm90.plan import BY_INLINE_PTX
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.kernel import (
    CLUSTER,
    FEWEST_TILES,
    MOST,
    WARPS,
    WIDTH,
    topk_cluster_sm90_kernel,
)
from xmla.core.plan import ON_HOPPER, Condition, Constants, Implementation, Launch, Plan, overlap_limit
from xmla.core.values import Device, arithmetic, larger, next_power_of_2

MOST_TILES = 16  # of a CTA, in registers: 64 keys of a thread
# Rows of clusters, by the most columns; of more rows, programs with a list or the portable kernels take less: 64 of
# 32768 columns 12.8 µs, those 12.6 and 14.3; 96 take 18.8, 12.9 and 15.8 (H200, 2026-11-30).
MOST_ROWS = {32768: 64, 65536: 32, 131072: 8}
MOST_COLUMNS_OF_CTA = 8192
# Programs of a call of its own beside which the next may start where an SM has several CTAs, by the CTAs of each: 1 and
# 16 rows of 8192 columns take 4.1 and 4.4 µs where calls take turns 4.6 and 4.9, but 64 rows 6.0 and 5.1; clusters for
# one and eight rows of 65536 columns 6.3 and 8.4, in turns 6.8 and 7.6. A CTA that has an SM of its own is not slowed:
# 64 rows of 8192 columns 3.8 µs, 4.0 where programs of 64 registers take turns (H200, 2026-11-30).
MOST_BESIDE = {1: 16, CLUSTER.value: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Constants):
    """Constants of the kernel of clusters."""

    HAS_STARTS: bool
    UNIT: int  # of what it loads, `Spec.vector`
    TILES: int  # of each CTA, or of each warp of a short row: of four columns a thread
    BINS: int  # of a short row; 0: a cluster has the row
    CTAS: int  # of a program
    WARPS: int  # of a CTA
    PATIENT: bool  # core/lang/launches.py
    OVERLAP_LIMIT: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How the columns of a row are divided among threads."""

    ctas: int
    warps: int  # of a CTA
    tiles: int
    bins: int = 0
    registers: int | None = None  # None: an SM has one CTA


def shape_of(problem: Problem, device: Device) -> Shape:
    columns, few = next_power_of_2(problem["N"]), problem["T"] <= device.num_sms
    if problem["N"] > MOST_COLUMNS_OF_CTA:
        tiles = larger(FEWEST_TILES.value, columns // (CLUSTER.value * WIDTH.value))
        return Shape(CLUSTER.value, WARPS.value, tiles, registers=64 if tiles <= 4 else 128 if tiles <= 8 else None)
    # µs by 16 warps of 16 columns a thread, and by 8 of 32, of 8192 columns: 3.6 and 4.4 for one row, 12.7 and 15.2 for
    # 512, 41.1 and 42.5 for 2048, 152.5 and 152.6 for 8192. Of 4096 by 8 warps of 16, and by 16 of 8: 2.8 and 2.7 for
    # one row, 8.0 and 9.3 for 512, 77 and 110 for 8192 (H200, 2026-11-30).
    if problem["N"] > MOST_COLUMNS_OF_CTA // 2:
        return Shape(1, 16, 4, bins=2048, registers=None if few else 64)
    warps = larger(4, columns // 512)
    return Shape(1, warps, larger(1, columns // (128 * warps)), bins=128 * warps, registers=64)


def plan(problem: Problem, device: Device) -> Plan:
    logits, shape = problem.specs["logits"], shape_of(problem, device)
    patient = "logits" not in problem.written
    limit = overlap_limit(problem, device, "starts", "ends") // shape.ctas  # of programs
    if patient and shape.registers is not None:
        limit = min(limit, MOST_BESIDE[shape.ctas])
    launch = Launch(
        topk_cluster_sm90_kernel,
        grid=(problem["T"],),
        outputs=("indices",),
        arrays=problem.stand_ins(starts="ends"),
        sizes={"first_row": 0, "num_columns": problem["N"], "row_stride": logits.stride(0), "k": problem.attrs.k},
        constexprs={
            "C": Cluster(
                HAS_STARTS=problem.has("starts"),
                UNIT=1 if problem.has("starts") else logits.vector(logits.stride(0)),
                TILES=shape.tiles,
                BINS=shape.bins,
                CTAS=shape.ctas,
                WARPS=shape.warps,
                PATIENT=patient,
                OVERLAP_LIMIT=limit,
            )
        },
        num_warps=shape.warps,
        num_stages=1,
        num_ctas=shape.ctas,
        max_registers=shape.registers,
    )
    return Plan((launch,), problem.results, ("indices",))


def _many(problem: Problem, _: Device) -> str | None:
    rows, columns = problem["T"], problem["N"]
    return None if fits_clusters(rows, columns) else f"with {rows} rows of {columns} columns"


@arithmetic
def fits_clusters(rows: int, columns: int) -> bool:
    """Whether rows are few enough for clusters, or short enough for a CTA each."""
    return columns <= MOST_COLUMNS_OF_CTA or any(columns <= most and rows <= few for most, few in MOST_ROWS.items())


IMPLEMENTATION = Implementation(
    "gluon_sm90_cluster",
    plan,
    (
        ON_HOPPER,
        BY_INLINE_PTX,
        Condition(
            f"a k of at most {MOST.value}",
            lambda problem, _: None if problem.attrs.k <= MOST.value else f"with k of {problem.attrs.k}",
        ),
        Condition(
            f"at most {MOST_TILES * CLUSTER.value * WIDTH.value} columns",
            lambda problem, device: (
                None if shape_of(problem, device).tiles <= MOST_TILES else f"with {problem['N']} columns"
            ),
        ),
        Condition(
            f"of more than {MOST_COLUMNS_OF_CTA} columns at most "
            + ", ".join(f"{rows} rows of {columns}" for columns, rows in MOST_ROWS.items()),
            _many,
        ),
    ),
    "gluon_sm90_cluster",
)
