from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.kernel import KEYS
from xmla.core.ops.indexer.indexer_logits_paged.gluon_sm90.plan import PAGES
from xmla.core.ops.indexer.indexer_logits_paged.gluon_sm100.kernel import MAX_ROWS, indexer_logits_paged_sm100_kernel
from xmla.core.ops.indexer.indexer_logits_paged.plan import arrays_of, count_tiles, sizes_of
from xmla.core.ops.indexer.shared import SM90_CONDITIONS, Pages, Query, group_tokens
from xmla.core.plan import Constants, Implementation, Launch, Plan, on_gpus
from xmla.core.values import Device, smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackwellPagedLogits(Constants):
    """Constants of the kernel for sm_100."""

    QUERY: Query
    PAGES: Pages
    GROUP: int  # tokens that share a tile of keys, a power of two
    BLOCK_G: int  # groups whose tiles are counted at once
    OVERLAP_LIMIT: int  # core/lang/launches.py


def plan(problem: Problem, device: Device) -> Plan:
    grouping = group_tokens(problem, MAX_ROWS.value)
    launch = Launch(
        indexer_logits_paged_sm100_kernel,
        grid=(smaller(count_tiles(problem, grouping, KEYS.value), device.num_sms),),
        outputs=("logits",),
        arrays=arrays_of(problem),
        sizes=sizes_of(problem, grouping),
        constexprs={
            "C": BlackwellPagedLogits(
                QUERY=Query.of(problem),
                PAGES=Pages.of(problem),
                GROUP=grouping.group,
                BLOCK_G=256,
                OVERLAP_LIMIT=device.overlap_limit,
            )
        },
        num_warps=4,
        num_stages=1,
    )
    return Plan((launch,), problem.results, ("logits",))


# Asked for by its own name alone: it has run on no GPU.
IMPLEMENTATION = Implementation(
    "gluon_sm100", plan, (on_gpus(100, 103), *SM90_CONDITIONS[1:], PAGES), "gluon_sm100", by_name=True
)
