from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.op import Composition, same_names
from xmla.core.ops.indexer import indexer_logits_paged
from xmla.core.ops.indexer.indexer_topk.kernels import merge_segments_kernel
from xmla.core.ops.indexer.indexer_topk.plan import BLOCKS, Topk, capacity, configure, require_room, space
from xmla.core.ops.indexer.indexer_topk_paged.kernels import indexer_topk_paged_kernel
from xmla.core.ops.indexer.shared import MAX_ROWS, Grouping, Keys, Pages, Query, group_tokens, keys_are_mxfp4
from xmla.core.ops.selection import select_topk
from xmla.core.ops.selection.select_topk.plan import choosing_warps
from xmla.core.plan import Launch, Plan, in_parts, join_parts, most_registers
from xmla.core.values import Device, Spec, cdiv, next_power_of_2

MAX_MERGED = 16384  # candidates of a row's segments, in registers
BLOCK = BLOCKS[-1]  # a row has its own candidates: more segments are better than longer blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTopk(Topk):
    """Constants of the kernel over pages."""

    PAGES: Pages
    SEGMENTS: int  # programs that divide a token's keys


def plan(problem: Problem, device: Device) -> Plan:
    composition = Composition(problem, device)
    composition.call(indexer_logits_paged.OP, same_names(*indexer_logits_paged.OP.tensors))
    composition.call(select_topk.OP, {"logits": "logits", "ends": "lengths"}, k=problem.attrs.k)
    stored = composition.plan()
    return stored if stored.workspace_bytes <= problem.attrs.workspace_bytes else plan_by_candidates(problem, device)


def plan_by_candidates(problem: Problem, device: Device) -> Plan:
    """The plan whose programs keep candidates and no logits, of as many tokens at a time as fit the workspace."""
    grouping, tokens = group_tokens(problem, MAX_ROWS), problem["T"]
    divides = grouping.groups_a_request * grouping.group == grouping.next_n or problem["B"] == 1
    together = grouping.group if divides else grouping.next_n  # tokens of which no group is of two parts
    require_room(problem, space(workspace(problem, grouping, min(together, tokens), 1)))
    given = problem.attrs.workspace_bytes
    segments = 1
    while (
        grouping.groups * segments < 2 * device.num_sms
        and 2 * segments * problem.attrs.k <= MAX_MERGED
        and space(workspace(problem, grouping, tokens, 2 * segments)) <= given
    ):
        segments *= 2
    if space(workspace(problem, grouping, tokens, segments)) <= given:
        return part(problem, device, grouping, tokens, segments)

    def undivided(size: int) -> Plan:
        return part(problem, device, grouping, size, 1)

    row_bytes = 8 * capacity(problem.attrs.k, BLOCK)
    plan = in_parts(problem, undivided, row_bytes, together, lambda size: True)
    if plan is None:
        needed = join_parts(problem, undivided, together).workspace_bytes
        problem.unsupported("workspace_bytes", "value", given, f"at least {needed} for these sizes")
    return plan


def groups_of(grouping: Grouping, tokens: int) -> int:
    """Groups of so many tokens, from the first of a group on."""
    requests, rest = tokens // grouping.next_n, tokens % grouping.next_n
    return requests * grouping.groups_a_request + cdiv(rest, grouping.group)


def workspace(problem: Problem, grouping: Grouping, tokens: int, segments: int) -> dict[str, Spec]:
    """Buffers of so many tokens, whose keys are divided among so many programs."""
    return {
        "candidates": Spec((tokens, segments, capacity(problem.attrs.k, BLOCK), 2), "int32"),
        "counts": Spec((tokens, segments), "int32"),
        "scores": Spec((groups_of(grouping, tokens) * segments, grouping.group, BLOCK), "float32"),
    }


def part(problem: Problem, device: Device, grouping: Grouping, tokens: int, segments: int) -> Plan:
    """The plan of so many tokens, whose programs keep candidates of a row's segments."""
    k, groups = problem.attrs.k, groups_of(grouping, tokens)
    buffers = workspace(problem, grouping, tokens, segments)
    config = configure(keys_are_mxfp4(problem), device)
    score = Launch(
        indexer_topk_paged_kernel,
        grid=(groups * segments,),
        outputs=tuple(buffers),
        arrays=problem.stand_ins(request_ids="lengths"),
        sizes={
            "num_requests": problem["B"],
            "num_pages": problem["P"],
            "table_stride": problem.specs["block_table"].stride(0),
            "capacity": problem["M"] * problem["R"],
            "next_n": grouping.next_n,
            "groups_a_request": grouping.groups_a_request,
            "first_row": 0,
        },
        constexprs={
            "C": PagedTopk(
                QUERY=Query.of(problem),
                KEYS=Keys.of(problem, device),
                K=k,
                GROUP=grouping.group,
                CAPACITY=capacity(k, BLOCK),
                BLOCK=BLOCK,
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
        sizes={"first_row": 0},
        constexprs={
            "K": k,
            "SEGMENTS": segments,
            "CAPACITY": capacity(k, BLOCK),
            "LANES": lanes,
            "BLOCK_K": min(2048, max(16, next_power_of_2(k))),
            "WARPS": warps,
        },
        num_warps=warps,
        num_stages=2,
        max_registers=most_registers(warps),
    )
    return Plan((score, merge), {**problem.results, **buffers}, ("indices",))
