from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops import indexer_logits_paged
from xmla.core.ops.indexer_logits.plan import MAX_ROWS, keys_are_mxfp4
from xmla.core.ops.indexer_logits_paged.plan import group_tokens, page_constexprs, page_inputs
from xmla.core.ops.indexer_topk.kernels import merge_segments_kernel
from xmla.core.ops.indexer_topk.plan import BLOCKS, capacity, configure, require_capacity, space, stored
from xmla.core.ops.indexer_topk_paged.kernels import indexer_topk_paged_kernel
from xmla.core.ops.select_topk.plan import choosing_warps
from xmla.core.plan import Launch, Plan, most_registers, next_power_of_2
from xmla.core.spec import Spec

MAX_MERGED = 16384  # candidates of a row's segments, in registers


def plan(problem: Problem, device: Device) -> Plan:
    names = {"ends": "lengths", "starts": "no_starts", "counts": "candidate_counts"}
    whole = stored(problem, device, indexer_logits_paged.OP, names)
    if whole.workspace_bytes <= problem.attrs["workspace_bytes"]:
        return whole
    specs, k, tokens = problem.specs, problem.attrs["k"], problem["T"]
    grouping = group_tokens(problem, MAX_ROWS)

    def workspace(segments: int, block: int) -> dict[str, Spec]:
        return {
            "candidates": Spec((tokens, segments, capacity(k, block), 2), "int32"),
            "segment_counts": Spec((tokens, segments), "int32"),
            "scores": Spec((grouping.groups * segments, grouping.group, block), "float32"),
        }

    block = BLOCKS[-1]  # a row has its own candidates: rather more segments than longer blocks
    require_capacity(problem, space(workspace(1, block)))
    segments = 1
    while (
        grouping.groups * segments < 2 * device.num_sms
        and 2 * segments * k <= MAX_MERGED
        and space(workspace(2 * segments, block)) <= problem.attrs["workspace_bytes"]
    ):
        segments *= 2
    shared = (("K", k), ("SEGMENTS", segments), ("CAPACITY", capacity(k, block)))
    buffers = workspace(segments, block)
    mxfp4 = keys_are_mxfp4(problem)
    config = configure(mxfp4, device)
    score = Launch(
        indexer_topk_paged_kernel,
        grid=(grouping.groups * segments,),
        inputs=page_inputs(problem),
        sizes=(
            problem["B"],
            problem["P"],
            specs["block_table"].stride(0),
            problem["M"] * problem["R"],
            grouping.next_n,
            grouping.groups_a_request,
        ),
        outputs=tuple(buffers),
        constexprs=(
            *page_constexprs(problem),
            ("MXFP4", mxfp4),
            ("HOPPER_SUMS", device.arch == 90),
            *shared,
            ("GROUP", grouping.group),
            ("BLOCK", block),
            ("BLOCK_N", config.block_n),
            ("BLOCK_I", grouping.block_i),
            ("WARPS", config.warps),
        ),
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
    lanes = max(1024, next_power_of_2(segments * k))
    warps = choosing_warps(lanes, tokens, device)
    merge = Launch(
        merge_segments_kernel,
        grid=(tokens,),
        inputs=("candidates", "segment_counts"),
        sizes=(),
        outputs=("indices",),
        constexprs=(*shared, ("LANES", lanes), ("BLOCK_K", min(2048, max(16, next_power_of_2(k)))), ("WARPS", warps)),
        num_warps=warps,
        num_stages=2,
        max_registers=most_registers(warps),
    )
    return Plan((score, merge), problem.op.result_specs(problem) | buffers, ("indices",))
