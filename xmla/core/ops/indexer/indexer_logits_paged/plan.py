from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.indexer.indexer_logits_paged.kernels import indexer_logits_paged_kernel
from xmla.core.ops.indexer.shared import MAX_ROWS, Grouping, Keys, Pages, Query, group_tokens, keys_are_mxfp4
from xmla.core.plan import Constants, Implementation, Launch, Plan, most_registers
from xmla.core.values import Device, cdiv, smaller

HOPPER_MAX_ROWS = 256  # four tokens of 64 heads share a tile of keys


@dataclass(frozen=True, slots=True)
class Config:
    block_n: int
    warps: int
    stages: int
    programs_a_sm: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLogits(Constants):
    """Constants of the portable kernel."""

    QUERY: Query
    KEYS: Keys
    PAGES: Pages
    GROUP: int  # tokens that share a tile of keys, a power of two
    BLOCK_G: int  # groups whose tiles are counted at once when work is divided
    BLOCK_N: int  # keys of a tile
    OVERLAP_LIMIT: int  # core/lang/launches.py


def configure(rows: int, mxfp4: bool, device: Device) -> Config:
    """The tile of a product with `rows` rows of heads."""
    if device.arch != 90:
        # Accumulators in registers leave room for 64 keys. With 4 warps 128 rows spill on sm_100, and MXFP4 spills on
        # every architecture; ptxas also spills to raise occupancy.
        block_n = 128 if device.has_tensor_memory else 64
        if device.arch >= 120:
            # As SM12x's code on an H200, 64 requests of two tokens: 93 against 142 µs with two stages in 156 registers,
            # of which an SM holds one program. So it does of two tokens over MXFP4 keys, which spill in 128.
            if rows >= MAX_ROWS:
                return Config(block_n, 8, 2, 1, 255) if mxfp4 else Config(block_n, 8, 3, 2, 128)
            return Config(block_n, 8, 2, 2, 128) if mxfp4 else Config(block_n, 4, 2, 4, 255)
        warps = 8 if mxfp4 or rows >= MAX_ROWS else 4
        return Config(block_n, warps, 2, 2 if mxfp4 else 4, most_registers(warps))
    if mxfp4:
        return Config(128, 8, 2, 2)  # 4 warps spill
    # Tiles that Triton 3.9 compiles without spilling (3.7 also kept 128 and 256 rows in 128 registers).
    if rows <= 64:
        return Config(128, 4, 3, 3, 168)
    return Config(64, 8, 3, 2, 128) if rows <= 128 else Config(64, 8, 3, 1, 255)


def columns(problem: Problem) -> int:
    max_len = problem.attrs.max_len
    return problem["M"] * problem["R"] if max_len is None else max_len


def arrays_of(problem: Problem) -> dict[str, str]:
    return problem.stand_ins(request_ids="lengths")


def sizes_of(problem: Problem, grouping: Grouping) -> dict[str, int]:
    return {
        "num_groups": grouping.groups,
        "num_requests": problem["B"],
        "num_pages": problem["P"],
        "max_len": columns(problem),
        "table_stride": problem.specs["block_table"].stride(0),
        "capacity": smaller(columns(problem), problem["M"] * problem["R"]),
        "next_n": grouping.next_n,
        "groups_a_request": grouping.groups_a_request,
    }


def count_tiles(problem: Problem, grouping: Grouping, block_n: int) -> int:
    """Tiles of keys of a call whose tokens all have the largest possible length."""
    return grouping.groups * cdiv(smaller(columns(problem), problem["M"] * problem["R"]), block_n)


def plan(problem: Problem, device: Device) -> Plan:
    mxfp4 = keys_are_mxfp4(problem)
    grouping = group_tokens(problem, HOPPER_MAX_ROWS if device.arch == 90 and not mxfp4 else MAX_ROWS)
    config = configure(grouping.group * grouping.block_i, mxfp4, device)
    launch = Launch(
        indexer_logits_paged_kernel,
        grid=(smaller(count_tiles(problem, grouping, config.block_n), device.num_sms * config.programs_a_sm),),
        outputs=("logits",),
        arrays=arrays_of(problem),
        sizes=sizes_of(problem, grouping),
        constexprs={
            "C": PagedLogits(
                QUERY=Query.of(problem),
                KEYS=Keys.of(problem, device),
                PAGES=Pages.of(problem),
                GROUP=grouping.group,
                BLOCK_G=256,
                BLOCK_N=config.block_n,
                OVERLAP_LIMIT=device.overlap_limit,
            )
        },
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
    return Plan((launch,), problem.results, ("logits",))


IMPLEMENTATION = Implementation("triton", plan)
