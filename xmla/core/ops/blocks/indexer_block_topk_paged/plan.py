from collections.abc import Callable

from xmla.core.call import Problem
from xmla.core.op import Composition
from xmla.core.ops.blocks.indexer_block_logits_paged.plan import part as block_logits
from xmla.core.ops.blocks.indexer_block_topk_paged.kernels import block_indices_kernel
from xmla.core.ops.blocks.shared import capacity_of, entries_of, refuse_workspace
from xmla.core.ops.selection import select_topk
from xmla.core.plan import Launch, Part, Plan, in_parts
from xmla.core.values import Device

BLOCKS_K = (512, 2048)  # indices of a step; few, since each is a kernel
WHOLE = ("widths",)


def plan(problem: Problem, device: Device) -> Plan:
    return select_in_blocks(problem, device, block_logits)


def select_in_blocks(problem: Problem, device: Device, logits: Callable[[Problem, Device, int], Plan]) -> Plan:
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
