from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.blocks.indexer_block_logits.kernels import indexer_block_logits_kernel
from xmla.core.ops.blocks.indexer_block_logits_paged.plan import splits
from xmla.core.ops.blocks.shared import entries_of
from xmla.core.ops.indexer.indexer_logits_paged.plan import configure
from xmla.core.ops.indexer.shared import Keys, Query, head_rows, keys_are_mxfp4
from xmla.core.plan import Constants, Implementation, Launch, Plan
from xmla.core.values import Device, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLogits(Constants):
    """Constants of the kernel."""

    QUERY: Query
    KEYS: Keys
    KEY_STRIDE: int
    GRANULARITY: int  # keys of a block
    BLOCK_N: int  # keys of a tile
    OVERLAP_LIMIT: int  # core/lang/launches.py


def part(problem: Problem, device: Device, rows: int, dtype: str = "float32") -> Plan:
    """The logits of `rows` tokens from `first_row` on."""
    columns = entries_of(problem)
    config = configure(head_rows(problem), keys_are_mxfp4(problem), device)
    divided = splits(rows, columns, config, device)
    results = {"widths": Spec((rows,), "int32"), "logits": Spec((rows, columns), dtype)}
    launch = Launch(
        indexer_block_logits_kernel,
        grid=(rows * divided,),
        outputs=tuple(results),
        sizes={
            "first_row": 0,
            "num_keys": problem["N"],
            "blocks_stride": problem.specs["blocks"].stride(0),
            "num_columns": columns,
            "splits": divided,
        },
        constexprs={
            "C": BlockLogits(
                QUERY=Query.of(problem),
                KEYS=Keys.of(problem, device),
                KEY_STRIDE=problem.specs["keys"].stride(0),
                GRANULARITY=problem.attrs.granularity,
                BLOCK_N=config.block_n,
                OVERLAP_LIMIT=device.overlap_limit,
            )
        },
        num_warps=config.warps,
        num_stages=config.stages,
        max_registers=config.max_registers,
    )
    return Plan((launch,), results, ("logits", "widths"))


def plan(problem: Problem, device: Device) -> Plan:
    return part(problem, device, problem["T"], problem.attrs.logits_dtype)


IMPLEMENTATION = Implementation("triton", plan)
