from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.selection.select_topk.gluon_sm90.plan import BY_INLINE_PTX, MOST_ROWS_OF_CLUSTERS
from xmla.core.ops.selection.select_topk.gluon_sm90_cluster.kernel import (
    CTAS,
    GROUPS,
    MOST,
    WARPS,
    WIDTH,
    topk_cluster_sm90_kernel,
)
from xmla.core.plan import ON_HOPPER, Condition, Constants, Implementation, Launch, Plan, overlap_limit
from xmla.core.values import Device, next_power_of_2

MOST_TILES = 16  # of a CTA, in registers: 64 keys of a thread
MOST_WIDE_ROWS = 8  # whose clusters, of one CTA an SM, run at the same time
WIDE = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Constants):
    """Constants of the kernel of clusters."""

    HAS_STARTS: bool
    UNIT: int  # of what it loads, `Spec.vector`
    TILES: int  # of each CTA
    OVERLAP_LIMIT: int  # core/lang/launches.py


def tiles_of(problem: Problem) -> int:
    return max(GROUPS.value, next_power_of_2(problem["N"]) // (CTAS.value * WIDTH.value))


def plan(problem: Problem, device: Device) -> Plan:
    logits = problem.specs["logits"]
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
                TILES=tiles_of(problem),
                OVERLAP_LIMIT=overlap_limit(problem, device, "starts", "ends") // CTAS.value,  # of programs
            )
        },
        num_warps=WARPS.value,
        num_stages=1,
        num_ctas=CTAS.value,
    )
    return Plan((launch,), problem.results, ("indices",))


def _many(problem: Problem, _: Device) -> str | None:
    most = MOST_WIDE_ROWS if problem["N"] > WIDE else MOST_ROWS_OF_CLUSTERS
    return None if problem["T"] <= most else f"with {problem['T']} rows of {problem['N']} columns"


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
            f"at most {MOST_TILES * CTAS.value * WIDTH.value} columns",
            lambda problem, _: None if tiles_of(problem) <= MOST_TILES else f"with {problem['N']} columns",
        ),
        Condition(f"at most {MOST_ROWS_OF_CLUSTERS} rows, {MOST_WIDE_ROWS} of more than {WIDE} columns", _many),
    ),
    "gluon_sm90_cluster",
)
