from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.indexer.indexer_topk.kernels import merge_segments_kernel
from xmla.core.ops.indexer.indexer_topk.plan import BLOCKS, Topk, capacity, configure, require_room, space
from xmla.core.ops.indexer.indexer_topk_paged.kernels import indexer_topk_paged_kernel
from xmla.core.ops.indexer.key_source import plan_by_logits
from xmla.core.ops.indexer.shared import MAX_ROWS, Keys, Pages, Query, group_tokens, keys_are_mxfp4
from xmla.core.ops.selection import select_topk
from xmla.core.ops.selection.select_topk.plan import choosing_warps
from xmla.core.plan import Launch, Plan, most_registers
from xmla.core.values import Device, Spec, next_power_of_2

MAX_MERGED = 16384  # candidates of a row's segments, in registers


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTopk(Topk):
    """Constants of the kernel over pages."""

    PAGES: Pages
    SEGMENTS: int  # programs that divide a token's keys


def plan(problem: Problem, device: Device) -> Plan:
    stored = plan_by_logits(problem, device, select_topk.OP, k=problem.attrs.k)
    return stored if stored.workspace_bytes <= problem.attrs.workspace_bytes else plan_by_candidates(problem, device)


def plan_by_candidates(problem: Problem, device: Device) -> Plan:
    """The plan whose programs keep candidates of a row's segments and no logits."""
    k, tokens = problem.attrs.k, problem["T"]
    grouping = group_tokens(problem, MAX_ROWS)

    def workspace(segments: int, block: int) -> dict[str, Spec]:
        return {
            "candidates": Spec((tokens, segments, capacity(k, block), 2), "int32"),
            "counts": Spec((tokens, segments), "int32"),
            "scores": Spec((grouping.groups * segments, grouping.group, block), "float32"),
        }

    block = BLOCKS[-1]  # a row has its own candidates: more segments are better than longer blocks
    require_room(problem, space(workspace(1, block)))
    segments = 1
    while (
        grouping.groups * segments < 2 * device.num_sms
        and 2 * segments * k <= MAX_MERGED
        and space(workspace(2 * segments, block)) <= problem.attrs.workspace_bytes
    ):
        segments *= 2
    buffers = workspace(segments, block)
    config = configure(keys_are_mxfp4(problem), device)
    score = Launch(
        indexer_topk_paged_kernel,
        grid=(grouping.groups * segments,),
        outputs=tuple(buffers),
        arrays=problem.stand_ins(request_ids="lengths"),
        sizes={
            "num_requests": problem["B"],
            "num_pages": problem["P"],
            "table_stride": problem.specs["block_table"].stride(0),
            "capacity": problem["M"] * problem["R"],
            "next_n": grouping.next_n,
            "groups_a_request": grouping.groups_a_request,
        },
        constexprs={
            "C": PagedTopk(
                QUERY=Query.of(problem),
                KEYS=Keys.of(problem, device),
                K=k,
                GROUP=grouping.group,
                CAPACITY=capacity(k, block),
                BLOCK=block,
                BLOCK_N=config.block_n,
                WARPS=config.warps,
                PAGES=Pages.of(problem),
                SEGMENTS=segments,
            )
        },
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
    lanes = max(1024, next_power_of_2(segments * k))
    warps = choosing_warps(lanes, tokens, device)
    merge = Launch(
        merge_segments_kernel,
        grid=(tokens,),
        outputs=("indices",),
        constexprs={
            "K": k,
            "SEGMENTS": segments,
            "CAPACITY": capacity(k, block),
            "LANES": lanes,
            "BLOCK_K": min(2048, max(16, next_power_of_2(k))),
            "WARPS": warps,
        },
        num_warps=warps,
        num_stages=2,
        max_registers=most_registers(warps),
    )
    return Plan((score, merge), {**problem.results, **buffers}, ("indices",))
