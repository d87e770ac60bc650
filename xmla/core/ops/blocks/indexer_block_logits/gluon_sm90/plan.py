from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.blocks.indexer_block_logits.gluon_sm90.kernel import (
    PIECE,
    indexer_block_logits_paged_sm90_kernel,
    indexer_block_logits_sm90_kernel,
)
from xmla.core.ops.blocks.indexer_block_logits.plan import sizes_of
from xmla.core.ops.blocks.shared import entries_of
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.kernel import KEYS
from xmla.core.ops.indexer.shared import SM90_CONDITIONS, Pages, Query, head_rows
from xmla.core.plan import Condition, Constants, Implementation, Launch, Plan
from xmla.core.values import Device, Spec, arithmetic, cdiv


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of keys in shared memory, CTAs of an SM, and registers of a thread, so that they fit."""

    stages: int
    programs_a_sm: int
    max_registers: int


# 64 tokens of 32 heads take 13.4 µs over 4096 keys and 40.4 over 131,072 by the first, 14.7 and 42.3 by the second
# (H200, 2026-11-30).
FEW_ROWS, OTHERS = Tiles(2, 4, 128), Tiles(3, 3, 168)
START = 2  # tiles that a CTA could have scored before it scores its first one


@arithmetic
def splits(rows: int, columns: int, num_sms: int, programs_a_sm: int) -> int:
    """CTAs of a token: as many as the machine holds at once, or one more if that divides the tiles better."""
    tiles = max(cdiv(columns, KEYS.value), 1)
    places = num_sms * programs_a_sm // max(rows, 1)

    def tiles_of_an_sm(divided: int) -> int:
        return cdiv(rows * divided, num_sms) * (cdiv(tiles, divided) + START)

    return min((min(max(divided, 1), tiles) for divided in (places, places + 1)), key=tiles_of_an_sm)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperBlockLogits(Constants):
    """Constants of Hopper's kernels."""

    QUERY: Query
    PAGES: Pages | None  # of contiguous keys None
    KEY_STRIDE: int  # of adjacent keys, in bytes
    GRANULARITY: int  # keys of a block
    STAGES: int  # tiles of keys in shared memory
    OVERLAP_LIMIT: int  # core/lang/launches.py


def part(problem: Problem, device: Device, rows: int, dtype: str = "float32") -> Plan:
    """The logits of `rows` tokens from `first_row` on."""
    paged = problem.has("cache")
    columns = entries_of(problem)
    tile = FEW_ROWS if head_rows(problem) <= 64 else OTHERS
    divided = splits(rows, columns, device.num_sms, tile.programs_a_sm)
    results = {"widths": Spec((rows,), "int32"), "logits": Spec((rows, columns), dtype)}
    launch = Launch(
        indexer_block_logits_paged_sm90_kernel if paged else indexer_block_logits_sm90_kernel,
        grid=(rows * divided,),
        outputs=tuple(results),
        arrays=problem.stand_ins(request_ids="lengths") if paged else {},
        sizes=sizes_of(problem, columns, divided),
        constexprs={
            "C": HopperBlockLogits(
                QUERY=Query.of(problem),
                PAGES=Pages.of(problem) if paged else None,
                KEY_STRIDE=problem["D"] if paged else problem.specs["keys"].stride(0),
                GRANULARITY=problem.attrs.granularity,
                STAGES=tile.stages,
                OVERLAP_LIMIT=device.overlap_limit,
            )
        },
        num_warps=4,
        num_stages=1,
        max_registers=tile.max_registers,
    )
    return Plan((launch,), results, ("logits", "widths"))


def plan(problem: Problem, device: Device) -> Plan:
    return part(problem, device, problem["T"], problem.attrs.logits_dtype)


def _small_blocks(problem: Problem, device: Device) -> str | None:
    keys = problem.attrs.granularity
    return f"in blocks of {keys} keys" if keys % PIECE.value else None


def _small_pages(problem: Problem, device: Device) -> str | None:
    keys = problem.page_size() if problem.has("cache") else PIECE.value
    return f"over pages of {problem['R']} keys" if keys % PIECE.value else None


CONDITIONS = (
    *SM90_CONDITIONS,
    Condition(f"blocks of a multiple of {PIECE.value} keys", _small_blocks),
    Condition(f"pages of a multiple of {PIECE.value} keys", _small_pages),
)
IMPLEMENTATION = Implementation("gluon_sm90", plan, CONDITIONS, "gluon")
