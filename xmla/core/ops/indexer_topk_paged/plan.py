from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops import indexer_logits_paged
from xmla.core.ops.indexer_logits_paged.plan import group_tokens, page_constexprs
from xmla.core.ops.indexer_topk.kernels import merge_segments_kernel
from xmla.core.ops.indexer_topk.plan import BLOCK_N, capacity, require_capacity, stored
from xmla.core.ops.indexer_topk_paged.kernels import indexer_topk_paged_kernel
from xmla.core.plan import Launch, Plan, next_power_of_2
from xmla.core.spec import Spec

MAX_MERGED = 16384  # candidates of a row's segments, in registers


def plan(problem: Problem, device: Device) -> Plan:
    names = {"ends": "lengths", "starts": "no_starts", "counts": "candidate_counts"}
    if (whole := stored(problem, device, indexer_logits_paged.OP, names)) is not None:
        return whole
    specs, k, tokens = problem.specs, problem.attrs["k"], problem["T"]
    grouping = group_tokens(problem)
    lanes = capacity(k)

    def workspace(segments: int) -> dict[str, Spec]:
        space = (tokens, segments, lanes)
        return {
            "candidates": Spec(space, "float32"),
            "columns": Spec(space, "int32"),
            "segment_counts": Spec(space[:2], "int32"),
        }

    def nbytes(segments: int) -> int:
        return Plan((), workspace(segments), ()).workspace_bytes

    require_capacity(problem, nbytes(1))
    segments = 1
    while (
        grouping.groups * segments < 2 * device.num_sms
        and 2 * segments * lanes <= MAX_MERGED
        and nbytes(2 * segments) <= problem.attrs["workspace_bytes"]
    ):
        segments *= 2
    shared = (("K", k), ("SEGMENTS", segments), ("CAPACITY", lanes))
    score = Launch(
        indexer_topk_paged_kernel,
        grid=(grouping.groups * segments,),
        inputs=("q8", "weights", "cache", "block_table", "lengths", problem.either("request_ids", "lengths")),
        sizes=(
            problem["B"],
            problem["P"],
            specs["block_table"].stride(0),
            problem["M"],
            grouping.next_n,
            grouping.groups_a_request,
        ),
        outputs=tuple(workspace(segments)),
        constexprs=(
            *page_constexprs(problem),
            ("GROUP", grouping.group),
            *shared,
            ("BLOCK_N", BLOCK_N),
            ("BLOCK_I", grouping.block_i),
        ),
        num_warps=8,
        num_stages=3,
    )
    merge = Launch(
        merge_segments_kernel,
        grid=(tokens,),
        inputs=tuple(workspace(segments)),
        sizes=(),
        outputs=("indices",),
        constexprs=(*shared, ("BLOCK_K", min(2048, max(16, next_power_of_2(k))))),
        num_warps=max(4, min(16, segments * lanes // 512)),
        num_stages=2,
    )
    return Plan((score, merge), problem.op.result_specs(problem) | workspace(segments), ("indices",))
