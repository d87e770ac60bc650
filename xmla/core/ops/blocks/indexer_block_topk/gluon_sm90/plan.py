from dataclasses import dataclass
from functools import partial

from xmla.core.call import Problem
from xmla.core.ops.blocks.indexer_block_logits.gluon_sm90 import plan as block_logits
from xmla.core.ops.blocks.indexer_block_topk.gluon_sm90.kernel import logits_at_places_sm90_kernel
from xmla.core.ops.blocks.indexer_block_topk.plan import plan_over_ranges, select_in_blocks, sizes_of_rows
from xmla.core.ops.blocks.shared import entries_of
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.plan import REGISTERS, HopperLogits, grid_of, tokens_a_program
from xmla.core.ops.indexer.shared import SM90_CONDITIONS, Query
from xmla.core.plan import Condition, Implementation, Launch, Plan
from xmla.core.values import Device

# Keys of the call for each key of a token's blocks: 512 of 16384 keys take 1229 µs at 2, 1262 where each of 4096 tokens
# reads its own blocks; 802 and 664 at 2.5 (2048 tokens, H200, 2026-11-30).
MOST_KEYS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperLogitsAtPlaces(HopperLogits):
    """Constants of Hopper's kernel."""

    GRANULARITY: int  # keys of a block


def logits(problem: Problem, device: Device, rows: int) -> Launch:
    grid, chunk = grid_of(problem, device, rows)
    return Launch(
        logits_at_places_sm90_kernel,
        grid=grid,
        outputs=("logits",),
        sizes=sizes_of_rows(problem) | {"num_tokens": rows, "chunk": chunk},
        constexprs={
            "C": HopperLogitsAtPlaces(
                QUERY=Query.of(problem),
                KEY_STRIDE=problem.specs["keys"].stride(0),
                GRANULARITY=problem.attrs.granularity,
            )
        },
        num_warps=4,
        num_stages=1,
        max_registers=REGISTERS,
    )


def plan(problem: Problem, device: Device) -> Plan:
    dense = plan_over_ranges(problem, device, logits, tokens_a_program(problem, device))
    if dense is not None:
        return dense
    if problem.implementation == "gluon":
        got = f"'gluon' where the logits of {tokens_a_program(problem, device)} tokens do not fit workspace_bytes"
        problem.unsupported("implementation", "value", got, "'triton', or more workspace_bytes")
    return select_in_blocks(problem, device)


def _longer(problem: Problem, device: Device) -> str | None:
    keys, of_blocks = problem["N"], entries_of(problem)
    return None if keys <= MOST_KEYS * of_blocks else f"with {keys} keys, {of_blocks} of a token's blocks"


CONDITIONS = (*SM90_CONDITIONS, Condition(f"at most {MOST_KEYS} times as many keys as a token's blocks have", _longer))
IMPLEMENTATION = Implementation("gluon_sm90", plan, CONDITIONS, "gluon")
IN_BLOCKS = Implementation(
    "gluon_sm90_in_blocks", partial(select_in_blocks, logits=block_logits.part), block_logits.CONDITIONS, "gluon"
)
