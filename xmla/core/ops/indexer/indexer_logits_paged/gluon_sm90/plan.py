from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.kernel import KEYS, ROWS
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.plan import PROGRAMS_A_SM, REGISTERS
from xmla.core.ops.indexer.indexer_logits_paged.gluon_sm90.kernel import HALF, indexer_logits_paged_sm90_kernel
from xmla.core.ops.indexer.indexer_logits_paged.plan import arrays_of, count_tiles, sizes_of
from xmla.core.ops.indexer.shared import SM90_CONDITIONS, Pages, Query, group_tokens
from xmla.core.plan import Condition, Constants, Implementation, Launch, Plan, overlap_limit
from xmla.core.values import Device, smaller, up_to


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperPagedLogits(Constants):
    """Constants of Hopper's kernel."""

    QUERY: Query
    PAGES: Pages
    GROUP: int  # tokens that share a tile of keys, a power of two
    STAGES: int  # tiles of keys in shared memory
    BLOCK_G: int  # groups whose tiles are counted at once
    OVERLAP_LIMIT: int  # core/lang/launches.py
    KEYS_EARLY: bool  # the first keys are copied before it waits: launches before it write none


def plan(problem: Problem, device: Device) -> Plan:
    grouping = group_tokens(problem, ROWS.value)
    # With few rows one more CTA fits on an SM: 22.3 instead of 23.9 µs at b=64, 8192 keys (H200, 2026-11-22).
    rows = grouping.group * grouping.block_i
    programs_a_sm = up_to(64, rows, 4, PROGRAMS_A_SM)
    launch = Launch(
        indexer_logits_paged_sm90_kernel,
        grid=(smaller(count_tiles(problem, grouping, KEYS.value), device.num_sms * programs_a_sm),),
        outputs=("logits",),
        arrays=arrays_of(problem),
        sizes=sizes_of(problem, grouping),
        constexprs={
            "C": HopperPagedLogits(
                QUERY=Query.of(problem),
                PAGES=Pages.of(problem),
                GROUP=grouping.group,
                STAGES=up_to(64, rows, 2, 3),
                BLOCK_G=256,
                OVERLAP_LIMIT=overlap_limit(problem, device, "block_table", "lengths", "request_ids"),
                KEYS_EARLY="cache" not in problem.written,
            )
        },
        num_warps=4,
        num_stages=1,
        max_registers=up_to(64, rows, 128, REGISTERS),
        spreads=True,
    )
    return Plan((launch,), problem.results, ("logits",))


PAGES = Condition(
    f"pages of a multiple of {HALF.value} keys",
    lambda problem, device: f"over pages of {problem['R']} keys" if problem["R"] % HALF.value else None,
)
IMPLEMENTATION = Implementation("gluon_sm90", plan, (*SM90_CONDITIONS, PAGES), "gluon")
