from dataclasses import replace

from xmla.core.call import Problem
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V4, V32
from xmla.core.ops.attention.sparse_mla.gluon_sm120.kernel import (
    BLOCK_N,
    GROUPS,
    STAGES,
    WARPS,
    sparse_mla_sm120_kernel,
)
from xmla.core.ops.attention.sparse_mla.plan import MAX_HEADS
from xmla.core.ops.attention.sparse_mla.splits import Config, attention_plan
from xmla.core.plan import Condition, Implementation, Plan, on_gpus
from xmla.core.values import Device, cdiv

FEW = 8  # programs of 32 heads for so many SMs leave them idle, though keys are split
FORMATS = (V32, V4, PLAIN, PLAIN_V4)


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


def _other_format(problem: Problem, device: Device) -> str | None:
    layout = problem.formats["cache"]
    return None if layout in FORMATS else f"over {layout.name!r} entries"


def _other_queries(problem: Problem, device: Device) -> str | None:
    dtype = problem.specs["q"].dtype
    return f"for {dtype} queries" if problem.formats["cache"].packed and dtype != "bfloat16" else None


def _mixed_sources(problem: Problem, device: Device) -> str | None:
    layout, extra = problem.formats["cache"], problem.formats.get("extra_cache")
    if extra is None or extra == layout:
        return None
    return f"with {extra.name!r} entries beside {layout.name!r} ones"


def _between_rows(problem: Problem, device: Device) -> str | None:
    for name in ("cache", "extra_cache"):
        if problem.has(name) and not problem.specs[name].on_multiples(16, (0,)):
            return f"over rows of {problem.called(name)} between multiples of 16 bytes"
    return None


CONDITIONS = (
    on_gpus(120, 121),
    Condition(" or ".join(repr(layout.name) for layout in FORMATS) + " entries", _other_format),
    Condition("bfloat16 queries over packed entries", _other_queries),
    Condition("one source, or two of one format", _mixed_sources),
    Condition("rows on multiples of 16 bytes", _between_rows),
)
IMPLEMENTATION = Implementation("gluon_sm120", plan, CONDITIONS, "gluon")
