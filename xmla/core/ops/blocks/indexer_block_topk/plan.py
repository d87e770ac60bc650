from collections.abc import Callable
from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.blocks.indexer_block_logits.plan import part as gathered
from xmla.core.ops.blocks.indexer_block_topk.kernels import (
    block_places_kernel,
    logits_at_places_kernel,
    repeat_logits_kernel,
)
from xmla.core.ops.blocks.indexer_block_topk_paged.plan import plan_in_parts, select_in_blocks
from xmla.core.ops.blocks.shared import entries_of
from xmla.core.ops.indexer.indexer_logits.plan import Logits, configure
from xmla.core.ops.indexer.shared import MAX_ROWS, Keys, Query, head_rows
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, Spec, cdiv

BLOCK_N = 2048  # columns, or blocks, of a step over a row of places


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsAtPlaces(Logits):
    """Constants of the portable kernel over whole ranges."""

    GRANULARITY: int  # keys of a block


def plan(problem: Problem, device: Device) -> Plan:
    """Whole ranges are scored where they have no more keys than the blocks: no more products, and tokens share keys.

    Otherwise, or without room for the tokens of a program, each token reads the keys of its blocks.
    """
    if problem["N"] <= entries_of(problem):
        dense = plan_over_ranges(problem, device, logits, configure(problem, device).block_t)
        if dense is not None:
            return dense
    return select_in_blocks(problem, device, gathered)


def plan_over_ranges(
    problem: Problem, device: Device, logits: Callable[[Problem, Device, int], Launch], together: int
) -> Plan | None:
    """The plan that scores all keys of ranges by a launch of `logits`, of `together` tokens or more at a time.

    None if they do not fit the workspace.
    """

    def part(problem: Problem, device: Device, rows: int) -> Plan:
        return scatter_logits(problem, device, rows, logits(problem, device, rows))

    row_bytes = 4 * max(entries_of(problem) + num_blocks(problem), 1)
    return plan_in_parts(problem, device, part, row_bytes, max(1, min(together, problem["T"])))


def num_blocks(problem: Problem) -> int:
    """Blocks of a range of all keys."""
    return cdiv(problem["N"], problem.attrs.granularity)


def sizes_of_rows(problem: Problem) -> dict[str, int]:
    return {
        "first_row": 0,
        "num_keys": problem["N"],
        "num_blocks": num_blocks(problem),
        "num_columns": entries_of(problem),
    }


def scatter_logits(problem: Problem, device: Device, rows: int, logits: Launch) -> Plan:
    """The logits of the blocks of `rows` tokens, which the launch `logits` stores at each block's place."""
    sizes = sizes_of_rows(problem) | {"blocks_stride": problem.specs["blocks"].stride(0)}
    constexprs = {
        "GRANULARITY": problem.attrs.granularity,
        "BLOCK_N": BLOCK_N,
        "OVERLAP_LIMIT": device.overlap_limit,
    }
    buffers = {
        "logits": Spec((rows, entries_of(problem)), "float32"),
        "widths": Spec((rows,), "int32"),
        "places": Spec((rows, num_blocks(problem)), "int32"),
        "repeats": Spec((rows,), "int32"),
    }
    places = Launch(
        block_places_kernel, grid=(rows,), outputs=tuple(buffers), sizes=sizes, constexprs=constexprs, num_warps=8
    )
    repeat = Launch(repeat_logits_kernel, grid=(rows,), outputs=("logits",), sizes=sizes, constexprs=constexprs)
    return Plan((places, logits, repeat), buffers, ("logits", "widths"))


def logits(problem: Problem, device: Device, rows: int) -> Launch:
    """The launch that scores the keys of `rows` tokens by the portable kernel."""
    config = configure(problem, device)
    return Launch(
        logits_at_places_kernel,
        grid=(cdiv(rows, config.block_t) * cdiv(problem["N"], config.block_n),),
        outputs=("logits",),
        sizes=sizes_of_rows(problem) | {"num_tokens": rows},
        constexprs={
            "C": LogitsAtPlaces(
                QUERY=Query.of(problem),
                KEYS=Keys.of(problem, device),
                KEY_STRIDE=problem.specs["keys"].stride(0),
                BLOCK_T=config.block_t,
                GROUP=min(config.block_t, MAX_ROWS // head_rows(problem)),
                BLOCK_N=config.block_n,
                GRANULARITY=problem.attrs.granularity,
            )
        },
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
