from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.selection.select_topk.gluon_sm90.plan import BY_INLINE_PTX
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.kernel import (
    CLUSTER,
    GROUPS,
    MOST,
    WARPS,
    WIDTH,
    topk_cluster_sm90_kernel,
)
from xmla.core.plan import ON_HOPPER, Condition, Constants, Implementation, Launch, Plan, overlap_limit
from xmla.core.values import Device, arithmetic, next_power_of_2

MOST_TILES = 16  # of a CTA, in registers: 64 keys of a thread
# Rows of clusters, by the most columns; of more rows, programs with a list or the portable kernels take less: 64 of
# 32768 columns 12.8 µs, those 12.6 and 14.3; 96 take 18.8, 12.9 and 15.8 (H200, 2026-11-30).
MOST_ROWS = {32768: 64, 65536: 32, 131072: 8}
# Columns of a row in the registers of one CTA: 2048 rows of 8192 take 63.8 µs, by programs with a list 76.6; a row of
# 4096 5.0, by a cluster 5.9; eight of 8192 6.9 by either. Of 16384 neither few nor many take less (the same run).
MOST_COLUMNS_OF_CTA = 8192
MOST_COLUMNS_OF_FEW, FEW_ROWS = 4096, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Constants):
    """Constants of the kernel of clusters."""

    HAS_STARTS: bool
    UNIT: int  # of what it loads, `Spec.vector`
    TILES: int  # of each CTA
    CTAS: int  # of a program
    OVERLAP_LIMIT: int  # core/lang/launches.py


@arithmetic
def registers_of_cta(tiles: int) -> int:
    """Registers of a row of one CTA, of which four or three are on an SM."""
    return 64 if tiles <= 4 else 80


def ctas_of(problem: Problem) -> int:
    """CTAs of a row."""
    most = MOST_COLUMNS_OF_FEW if problem["T"] <= FEW_ROWS else MOST_COLUMNS_OF_CTA
    return 1 if problem["N"] <= most else CLUSTER.value


def tiles_of(problem: Problem) -> int:
    """Tiles of each CTA of a row."""
    return max(GROUPS.value, next_power_of_2(problem["N"]) // (ctas_of(problem) * WIDTH.value))


def plan(problem: Problem, device: Device) -> Plan:
    logits, ctas, tiles = problem.specs["logits"], ctas_of(problem), tiles_of(problem)
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
                TILES=tiles,
                CTAS=ctas,
                OVERLAP_LIMIT=overlap_limit(problem, device, "starts", "ends") // ctas,  # of programs
            )
        },
        num_warps=WARPS.value,
        num_stages=1,
        num_ctas=ctas,
        max_registers=registers_of_cta(tiles) if ctas == 1 else None,
    )
    return Plan((launch,), problem.results, ("indices",))


def _many(problem: Problem, _: Device) -> str | None:
    rows, columns = problem["T"], problem["N"]
    if columns <= MOST_COLUMNS_OF_CTA or any(columns <= most and rows <= few for most, few in MOST_ROWS.items()):
        return None
    return f"with {rows} rows of {columns} columns"


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
            lambda problem, _: None if tiles_of(problem) <= MOST_TILES else f"with {problem['N']} columns",
        ),
        Condition(
            f"of more than {MOST_COLUMNS_OF_CTA} columns at most "
            + ", ".join(f"{rows} rows of {columns}" for columns, rows in MOST_ROWS.items()),
            _many,
        ),
    ),
    "gluon_sm90_cluster",
)
