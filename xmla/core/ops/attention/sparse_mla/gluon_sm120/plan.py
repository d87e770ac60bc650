from dataclasses import replace

from xmla.core.call import Problem
from xmla.core.formats.mla import NOPE, PLAIN, PLAIN_V4, V4, V32
from xmla.core.ops.attention.sparse_mla.conditions import BFLOAT16_QUERIES, between_rows, entries_of, one_format
from xmla.core.ops.attention.sparse_mla.gluon_sm120.common import BLOCK_N, GROUPS, WARPS
from xmla.core.ops.attention.sparse_mla.gluon_sm120.kernel import STAGES, sparse_mla_sm120_kernel
from xmla.core.ops.attention.sparse_mla.plan import MAX_HEADS
from xmla.core.ops.attention.sparse_mla.splits import Config, attention_plan
from xmla.core.plan import Condition, Implementation, Plan, on_gpus
from xmla.core.values import Device, cdiv

FEW = 8  # programs of 32 heads for so many SMs leave them idle, though keys are split
FORMATS = (V32, V4, NOPE, PLAIN, PLAIN_V4)


def configure(tokens: int, heads: int, device: Device) -> Config:
    """A tile of 32 heads, or of 16 where there are no more, or where the programs leave most SMs idle.

    As SM12x's code on an H200: 252 against 365 µs for 64 tokens of 128 heads, 17.8 against 15.2 for one.
    """
    wide = Config(32, BLOCK_N.value, WARPS.value, STAGES.value, powers=GROUPS.value)
    few = heads <= 16 or tokens * cdiv(heads, wide.block_h) < device.num_sms // FEW
    return replace(wide, block_h=16) if few else wide


def plan(problem: Problem, device: Device) -> Plan:
    # A head's bits depend on its tile: tensor-parallel ranks use the tile of all heads, whatever the tokens.
    invariant = problem.attrs.batch_invariant
    config = configure(*((device.num_sms, MAX_HEADS) if invariant else (problem["T"], problem["H"])), device)
    return attention_plan(problem, device, sparse_mla_sm120_kernel, config)


ROWS = {"cache": 16, "extra_cache": 16}  # bytes, on whose multiples rows begin
CONDITIONS = (
    on_gpus(120, 121),
    entries_of(FORMATS),
    BFLOAT16_QUERIES,
    one_format(),
    Condition("rows on multiples of 16 bytes", lambda problem, _: between_rows(problem, ROWS)),
)
IMPLEMENTATION = Implementation("gluon_sm120", plan, CONDITIONS, "gluon")
