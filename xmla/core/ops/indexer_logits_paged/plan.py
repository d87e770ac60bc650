from dataclasses import dataclass

from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops.indexer_logits.plan import MAX_ROWS, keys_are_mxfp4, query_constexprs
from xmla.core.ops.indexer_logits_paged.kernels import indexer_logits_paged_kernel
from xmla.core.plan import Launch, Plan, cdiv, next_power_of_2

# 128 keys, 4 warps, 2 stages, 4 programs an SM: 3468 GB/s on an H200 at b=64, 65536 keys, 2026-11-21; 3 stages cost
# registers and with them a program an SM (2758).
BLOCK_N = 128
PROGRAMS_A_SM = 4


@dataclass(frozen=True, slots=True)
class Grouping:
    """How flat tokens share tiles of keys: `group` adjacent tokens of a request, `block_i` rows of heads each."""

    next_n: int
    block_i: int
    group: int
    groups_a_request: int
    groups: int


def group_tokens(problem: Problem) -> Grouping:
    """As many tokens of a request together as one matrix product takes; tokens with request ids stand alone."""
    ids = problem.has("request_ids")
    next_n = 1 if ids else max(problem["T"] // problem["B"], 1)
    block_i = max(16, next_power_of_2(problem["I"]))
    group = min(next_power_of_2(next_n), max(1, MAX_ROWS // block_i))
    groups_a_request = cdiv(next_n, group)
    return Grouping(next_n, block_i, group, groups_a_request, problem["T"] // next_n * groups_a_request)


def page_constexprs(problem: Problem) -> tuple[tuple[str, int], ...]:
    """What every kernel that reads the query and the paged keys knows of them."""
    return (
        *query_constexprs(problem),
        ("PAGE_STRIDE", problem.specs["cache"].stride(0)),
        ("PAGE_SIZE", problem["R"]),
        ("HAS_REQUEST_IDS", problem.has("request_ids")),
    )


def plan(problem: Problem, device: Device) -> Plan:
    specs = problem.specs
    grouping = group_tokens(problem)
    mxfp4 = keys_are_mxfp4(problem)
    results = problem.op.result_specs(problem)
    max_len = results["logits"].shape[1]
    tiles = grouping.groups * cdiv(min(max_len, problem["M"] * problem["R"]), BLOCK_N)
    programs = min(tiles, device.num_sms * (2 if mxfp4 else PROGRAMS_A_SM))
    launch = Launch(
        indexer_logits_paged_kernel,
        grid=(programs,),
        inputs=("q8", "weights", "cache", "block_table", "lengths", problem.either("request_ids", "lengths")),
        sizes=(
            grouping.groups,
            problem["B"],
            problem["P"],
            max_len,
            specs["block_table"].stride(0),
            problem["M"],
            grouping.next_n,
            grouping.groups_a_request,
        ),
        outputs=("logits",),
        constexprs=(
            *page_constexprs(problem),
            ("GROUP", grouping.group),
            ("BLOCK_G", 256),
            ("BLOCK_N", BLOCK_N),
            ("BLOCK_I", grouping.block_i),
        ),
        # Elsewhere 8 warps for products of 128 rows: with 4 they spill on sm_100 and sm_121. So does MXFP4 everywhere.
        num_warps=8 if mxfp4 or (device.arch != 90 and grouping.group * grouping.block_i >= MAX_ROWS) else 4,
        num_stages=2,
        # Four programs an SM: 164 against 217 µs with one token a request, 205 against 260 with two (H200, 2026-11-21).
        max_registers=128 if device.arch == 90 and not mxfp4 else None,
    )
    return Plan((launch,), results, ("logits",))
