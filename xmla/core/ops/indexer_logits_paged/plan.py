from dataclasses import dataclass

from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops.indexer_logits.gluon_sm90 import KEYS, ROWS
from xmla.core.ops.indexer_logits.plan import (
    MAX_ROWS,
    PROGRAMS_A_SM,
    REGISTERS,
    head_rows,
    keys_are_mxfp4,
    query_constexprs,
    unmet_by_hand,
)
from xmla.core.ops.indexer_logits_paged.gluon_sm90 import HALF, indexer_logits_paged_sm90_kernel
from xmla.core.ops.indexer_logits_paged.kernels import indexer_logits_paged_kernel
from xmla.core.plan import Launch, Plan, cdiv, most_registers, next_power_of_2

HOPPER_MAX_ROWS = 256  # four tokens of 64 heads share a tile of keys


@dataclass(frozen=True, slots=True)
class Config:
    block_n: int
    warps: int
    stages: int
    programs_a_sm: int
    max_registers: int | None = None


def configure(rows: int, mxfp4: bool, device: Device) -> Config:
    """The tile of a product with `rows` rows of heads."""
    if device.arch != 90:
        # Products that stand in registers leave room for 64 keys. With 4 warps 128 rows spill on sm_100, and MXFP4 does
        # everywhere; so does what the compiler would take to fit more programs on an SM.
        block_n = 128 if device.has_tensor_memory else 64
        warps = 8 if mxfp4 or rows >= MAX_ROWS else 4
        return Config(block_n, warps, 2, 2 if mxfp4 else 4, most_registers(warps))
    if mxfp4:
        return Config(128, 8, 2, 2)  # with 4 warps it spills
    # What Triton 3.9 compiles without spilling (3.7 also kept 128 and 256 rows in 128 registers).
    if rows <= 64:
        return Config(128, 4, 3, 3, 168)
    return Config(64, 8, 3, 2, 128) if rows <= 128 else Config(64, 8, 3, 1, 255)


@dataclass(frozen=True, slots=True)
class Grouping:
    """How flat tokens share tiles of keys: `group` adjacent tokens of a request, `block_i` rows of heads each."""

    next_n: int
    block_i: int
    group: int
    groups_a_request: int
    groups: int


def group_tokens(problem: Problem, max_rows: int) -> Grouping:
    """As many tokens of a request together as a product of `max_rows` takes; tokens with request ids stand alone."""
    next_n = problem.tokens_a_request
    block_i = head_rows(problem)
    group = min(next_power_of_2(next_n), max(1, max_rows // block_i))
    groups_a_request = cdiv(next_n, group)
    return Grouping(next_n, block_i, group, groups_a_request, problem["T"] // next_n * groups_a_request)


def columns(problem: Problem) -> int:
    max_len = problem.attrs["max_len"]
    return problem["M"] * problem["R"] if max_len is None else max_len


def page_constexprs(problem: Problem) -> tuple[tuple[str, int], ...]:
    """What every kernel that reads the query and the paged keys knows of them."""
    return (
        *query_constexprs(problem),
        ("PAGE_STRIDE", problem.specs["cache"].stride(0)),
        ("PAGE_SIZE", problem["R"]),
        ("HAS_REQUEST_IDS", problem.has("request_ids")),
    )


def plan(problem: Problem, device: Device) -> Plan:
    unmet = unmet_by_hand(problem, device)
    if unmet is None and problem["R"] % HALF.value:
        unmet = f"over pages of {problem['R']} keys", f"pages of a multiple of {HALF.value} keys"
    by_hand = problem.takes_by_hand(unmet)
    launch = launch_by_hand(problem, device) if by_hand else launch_portable(problem, device)
    return Plan((launch,), problem.op.result_specs(problem), ("logits",))


def page_inputs(problem: Problem) -> tuple[str, ...]:
    return ("q8", "weights", "cache", "block_table", "lengths", problem.either("request_ids", "lengths"))


def sizes(problem: Problem, grouping: Grouping) -> tuple[int, ...]:
    return (
        grouping.groups,
        problem["B"],
        problem["P"],
        columns(problem),
        problem.specs["block_table"].stride(0),
        min(columns(problem), problem["M"] * problem["R"]),
        grouping.next_n,
        grouping.groups_a_request,
    )


def count_tiles(problem: Problem, grouping: Grouping, block_n: int) -> int:
    """Tiles of keys of a call whose tokens are all as long as they can be."""
    return grouping.groups * cdiv(min(columns(problem), problem["M"] * problem["R"]), block_n)


def launch_by_hand(problem: Problem, device: Device) -> Launch:
    grouping = group_tokens(problem, ROWS.value)
    # With few rows there is room for one program more: 22.3 instead of 23.9 µs at b=64, 8192 keys (H200, 2026-11-22).
    few = grouping.group * grouping.block_i <= 64
    programs_a_sm = 4 if few else PROGRAMS_A_SM
    return Launch(
        indexer_logits_paged_sm90_kernel,
        grid=(min(count_tiles(problem, grouping, KEYS.value), device.num_sms * programs_a_sm),),
        inputs=page_inputs(problem),
        sizes=sizes(problem, grouping),
        outputs=("logits",),
        constexprs=(
            *page_constexprs(problem),
            ("GROUP", grouping.group),
            ("STAGES", 2 if few else 3),
            ("BLOCK_G", 256),
            ("BLOCK_I", grouping.block_i),
        ),
        num_warps=4,
        num_stages=1,
        max_registers=128 if few else REGISTERS,
    )


def launch_portable(problem: Problem, device: Device) -> Launch:
    mxfp4 = keys_are_mxfp4(problem)
    grouping = group_tokens(problem, HOPPER_MAX_ROWS if device.arch == 90 and not mxfp4 else MAX_ROWS)
    config = configure(grouping.group * grouping.block_i, mxfp4, device)
    return Launch(
        indexer_logits_paged_kernel,
        grid=(min(count_tiles(problem, grouping, config.block_n), device.num_sms * config.programs_a_sm),),
        inputs=page_inputs(problem),
        sizes=sizes(problem, grouping),
        outputs=("logits",),
        constexprs=(
            *page_constexprs(problem),
            ("MXFP4", mxfp4),
            ("HOPPER_SUMS", device.arch == 90),
            ("GROUP", grouping.group),
            ("BLOCK_G", 256),
            ("BLOCK_N", config.block_n),
            ("BLOCK_I", grouping.block_i),
        ),
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
