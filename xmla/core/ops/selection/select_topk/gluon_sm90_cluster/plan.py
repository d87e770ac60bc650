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
MOST_ROWS = 16  # whose clusters run at the same time, of two CTAs an SM
MOST_WIDE_ROWS = 8  # whose clusters, of one CTA an SM, run at the same time
WIDE = 65536
MOST_COLUMNS_OF_CTA = 16384  # of a row in the registers of one


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
    """Registers of a row of one CTA, of which four, three or two are on an SM."""
    return 64 if tiles <= 4 else 80 if tiles <= 8 else 128


def ctas_of(problem: Problem) -> int:
    """CTAs of a row."""
    return 1 if problem["N"] <= MOST_COLUMNS_OF_CTA else CLUSTER.value


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
    most = MOST_WIDE_ROWS if problem["N"] > WIDE else MOST_ROWS
    if problem["N"] <= MOST_COLUMNS_OF_CTA or problem["T"] <= most:
        return None
    return f"with {problem['T']} rows of {problem['N']} columns"


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
            f"at most {MOST_ROWS} rows of over {MOST_COLUMNS_OF_CTA} columns, {MOST_WIDE_ROWS} of over {WIDE}", _many
        ),
    ),
    "gluon_sm90_cluster",
)
