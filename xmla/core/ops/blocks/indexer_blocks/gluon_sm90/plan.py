from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.blocks.indexer_blocks.gluon_sm90.kernel import block_maxima_sm90_kernel
from xmla.core.ops.indexer.indexer_logits.gluon_sm90.plan import REGISTERS, HopperLogits, grid_of
from xmla.core.ops.indexer.shared import Query
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, Spec, cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperMaxima(HopperLogits):
    """Constants of Hopper's kernel."""

    GRANULARITY: int  # keys of a block
    NEWEST: int  # blocks that are always selected


def maxima(problem: Problem, device: Device, rows: int) -> Plan:
    """The largest logit of each block of `rows` tokens, without their logits."""
    keys, attrs = problem["N"], problem.attrs
    grid, chunk = grid_of(problem, device, rows)
    blocks = cdiv(keys, attrs.granularity)
    buffers = {"block_counts": Spec((rows,), "int32"), "maxima": Spec((rows, blocks), "float32")}
    launch = Launch(
        block_maxima_sm90_kernel,
        grid=grid,
        outputs=tuple(buffers),
        sizes={
            "first_row": 0,
            "num_tokens": rows,
            "num_keys": keys,
            "num_blocks": blocks,
            "k": attrs.k,
            "chunk": chunk,
        },
        constexprs={
            "C": HopperMaxima(
                QUERY=Query.of(problem),
                KEY_STRIDE=problem.specs["keys"].stride(0),
                GRANULARITY=attrs.granularity,
                NEWEST=attrs.newest,
            )
        },
        num_warps=4,
        num_stages=1,
        max_registers=REGISTERS,
    )
    return Plan((launch,), buffers, tuple(buffers))
