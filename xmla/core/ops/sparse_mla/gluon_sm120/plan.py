from xmla.core.device import Device
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V4, V32
from xmla.core.implementation import Condition, Implementation
from xmla.core.ops.sparse_mla.gluon_sm120.kernel import BLOCK_N, GROUPS, STAGES, WARPS, sparse_mla_sm120_kernel
from xmla.core.ops.sparse_mla.plan import MAX_HEADS
from xmla.core.ops.sparse_mla.splits import Config, attention_plan
from xmla.core.plan import Plan
from xmla.core.problem import Problem

FORMATS = (V32, V4, PLAIN, PLAIN_V4)


def configure(heads: int) -> Config:
    """A tile of 32 heads, or of 16 where there are no more."""
    block_h = 16 if heads <= 16 else 32
    return Config(block_h, BLOCK_N.value, WARPS.value, STAGES.value, powers=GROUPS.value)


def plan(problem: Problem, device: Device) -> Plan:
    # A head's bits depend on its tile: tensor-parallel ranks use the tile of all heads.
    config = configure(MAX_HEADS if problem.attrs.batch_invariant else problem["H"])
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
    Condition(
        "compute capability 12.0 or 12.1",
        lambda problem, device: None if device.arch in (120, 121) else f"on {device.name}",
    ),
    Condition(" or ".join(repr(layout.name) for layout in FORMATS) + " entries", _other_format),
    Condition("bfloat16 queries over packed entries", _other_queries),
    Condition("one source, or two of one format", _mixed_sources),
    Condition("rows on multiples of 16 bytes", _between_rows),
)
IMPLEMENTATION = Implementation("gluon_sm120", plan, CONDITIONS, "gluon")
