from collections.abc import Callable
from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.op import Composition
from xmla.core.ops.blocks.indexer_block_logits.plan import part as block_logits
from xmla.core.ops.blocks.indexer_block_topk.kernels import (
    block_indices_kernel,
    block_places_kernel,
    logits_at_places_kernel,
    repeat_logits_kernel,
)
from xmla.core.ops.blocks.shared import capacity_of, entries_of, refuse_workspace
from xmla.core.ops.indexer.indexer_logits.plan import Logits, configure
from xmla.core.ops.indexer.shared import MAX_ROWS, Keys, Query, head_rows
from xmla.core.ops.selection import select_topk
from xmla.core.plan import Implementation, Launch, Part, Plan, in_parts
from xmla.core.values import Device, Spec, cdiv

BLOCKS_K = (512, 2048)  # indices of a step; few, since each is a kernel
BLOCK_N = 2048  # columns, or blocks, of a step over a row of places
WHOLE = ("widths",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsAtPlaces(Logits):
    """Constants of the portable kernel over whole ranges."""

    GRANULARITY: int  # keys of a block


def plan(problem: Problem, device: Device) -> Plan:
    """Whole ranges are scored where they have no more keys than the blocks: no more products, and tokens share keys.

    Otherwise, over pages, or without room for the tokens of a program, each token reads the keys of its blocks.
    """
    if problem.has("keys") and problem["N"] <= entries_of(problem):
        dense = plan_over_ranges(problem, device, logits, configure(problem, device).block_t)
        if dense is not None:
            return dense
    return select_in_blocks(problem, device)


def select_in_blocks(
    problem: Problem, device: Device, logits: Callable[[Problem, Device, int], Plan] = block_logits
) -> Plan:
    """The plan that stores the blocks' logits of as many tokens at a time as fit the workspace."""
    plan = plan_in_parts(problem, device, logits, 4 * max(entries_of(problem), 1))
    if plan is None:
        refuse_workspace(problem, part_of(problem, device, logits), 1, WHOLE)
    return plan


def plan_in_parts(
    problem: Problem, device: Device, logits: Callable[[Problem, Device, int], Plan], row_bytes: int, together: int = 1
) -> Plan | None:
    """The plan in parts of a multiple of `together` tokens, scored by `logits`; None if so many do not fit."""
    part = part_of(problem, device, logits)
    if not problem["T"]:
        return part(0)
    return in_parts(problem, part, row_bytes, together, lambda size: True, WHOLE)


def part_of(
    problem: Problem, device: Device, logits: Callable[[Problem, Device, int], Plan]
) -> Callable[[int], Plan]:  # fmt: skip
    """The plan of so many tokens: the blocks' logits, the columns with the largest, and their positions."""

    def part(rows: int) -> Plan:
        composition = Composition(problem, device)
        composition.add(Part("block_logits", logits(problem, device, rows), {"logits": "logits", "widths": "widths"}))
        composition.call(select_topk.OP, {"logits": "logits", "ends": "widths"}, k=problem.attrs.k)
        composition.add(Part("block_indices", positions(problem, device, rows), {"indices": "indices"}))
        return composition.plan()

    return part


def positions(problem: Problem, device: Device, rows: int) -> Plan:
    """Columns of `rows` tokens become positions, in place."""
    k, results = problem.attrs.k, problem.results
    ragged = problem.has("starts")
    launch = Launch(
        block_indices_kernel,
        grid=(rows,),
        outputs=("indices",),
        arrays={} if ragged else {"starts": "lengths", "ends": "lengths"},
        sizes={
            "first_row": 0,
            "num_keys": capacity_of(problem),
            "k": k,
            "blocks_stride": problem.specs["blocks"].stride(0),
            "num_columns": entries_of(problem),
        },
        constexprs={
            "HAS_STARTS": ragged,
            "UNIT": results["indices"].vector(k),
            "GRANULARITY": problem.attrs.granularity,
            "BLOCK_K": next((block for block in BLOCKS_K if k <= block), BLOCKS_K[-1]),
            "OVERLAP_LIMIT": device.overlap_limit,
        },
    )
    return Plan((launch,), results, ("indices",))


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


IMPLEMENTATION = Implementation("triton", plan)
