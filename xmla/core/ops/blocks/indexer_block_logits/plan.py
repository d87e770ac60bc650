from dataclasses import dataclass
from typing import Any

from xmla.core.call import Problem, tokens_a_request
from xmla.core.ops.blocks.indexer_block_logits.kernels import (
    indexer_block_logits_kernel,
    indexer_block_logits_paged_kernel,
)
from xmla.core.ops.blocks.shared import capacity_of, entries_of
from xmla.core.ops.indexer.indexer_logits_paged.plan import Config, configure
from xmla.core.ops.indexer.shared import Keys, Pages, Query, head_rows, keys_are_mxfp4
from xmla.core.plan import Constants, Launch, Plan
from xmla.core.values import Device, Spec, cdiv, larger, smaller


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLogits(Constants):
    """Constants of the kernel over contiguous keys."""

    QUERY: Query
    KEYS: Keys
    KEY_STRIDE: int
    GRANULARITY: int  # keys of a block
    BLOCK_N: int  # keys of a tile
    OVERLAP_LIMIT: int  # core/lang/launches.py


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBlockLogits(Constants):
    """Constants of the kernel over pages."""

    QUERY: Query
    KEYS: Keys
    PAGES: Pages
    HAS_BLOCKS: bool
    GRANULARITY: int  # keys of a block
    BLOCK_N: int  # keys of a tile
    OVERLAP_LIMIT: int  # core/lang/launches.py


def splits(rows: int, columns: int, config: Config, device: Device) -> int:
    """Programs a token: as many as fill the machine if the tokens alone do not."""
    wanted = cdiv(device.num_sms * config.programs_a_sm, larger(rows, 1))
    return larger(1, smaller(cdiv(columns, config.block_n), wanted))


def sizes_of(problem: Problem, columns: int, divided: int) -> dict[str, int]:
    """Sizes of kernels of which so many programs score a token's columns."""
    if problem.has("cache"):
        bounds = {
            "num_requests": problem["B"],
            "num_pages": problem["P"],
            "table_stride": problem.specs["block_table"].stride(0),
            "capacity": capacity_of(problem),
            "next_n": tokens_a_request(problem),
        }
    else:
        bounds = {"num_keys": problem["N"]}
    stride = problem.specs["blocks"].stride(0) if problem.has("blocks") else 0
    return {"first_row": 0, **bounds, "blocks_stride": stride, "num_columns": columns, "splits": divided}


def part(problem: Problem, device: Device, rows: int, dtype: str = "float32") -> Plan:
    """The logits of `rows` tokens from `first_row` on: over pages of all keys if the call has no blocks."""
    of_blocks = problem.has("blocks")
    columns = entries_of(problem) if of_blocks else capacity_of(problem)
    config = configure(head_rows(problem), keys_are_mxfp4(problem), device)
    divided = splits(rows, columns, config, device)
    results = {"widths": Spec((rows,), "int32"), "logits": Spec((rows, columns), dtype)}
    constants: dict[str, Any] = {
        "QUERY": Query.of(problem),
        "KEYS": Keys.of(problem, device),
        "GRANULARITY": problem.attrs.granularity,
        "BLOCK_N": config.block_n,
        "OVERLAP_LIMIT": device.overlap_limit,
    }
    if problem.has("cache"):
        kernel = indexer_block_logits_paged_kernel
        arrays = problem.stand_ins(request_ids="lengths", blocks="lengths")
        C = PagedBlockLogits(PAGES=Pages.of(problem), HAS_BLOCKS=of_blocks, **constants)
    else:
        kernel, arrays = indexer_block_logits_kernel, {}
        C = BlockLogits(KEY_STRIDE=problem.specs["keys"].stride(0), **constants)
    launch = Launch(
        kernel,
        grid=(rows * divided,),
        outputs=tuple(results),
        arrays=arrays,
        sizes=sizes_of(problem, columns, divided),
        constexprs={"C": C},
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
    return Plan((launch,), results, ("logits", "widths"))


def plan(problem: Problem, device: Device) -> Plan:
    return part(problem, device, problem["T"], problem.attrs.logits_dtype)
