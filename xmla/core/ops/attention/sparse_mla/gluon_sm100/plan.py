from xmla.core.call import Problem
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V4, V32
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import HALVES, TILE_HEADS, TILE_KEYS
from xmla.core.ops.attention.sparse_mla.gluon_sm100.kernel import sparse_mla_sm100_kernel
from xmla.core.ops.attention.sparse_mla.splits import Config, attention_plan
from xmla.core.plan import Condition, Implementation, Plan, on_gpus
from xmla.core.values import Device

FORMATS = (V32, V4, PLAIN, PLAIN_V4)
# The warps are those of the kernel's first partition. Each half of the dims has a power of two that its warps know.
CONFIG = Config(TILE_HEADS.value, TILE_KEYS.value, 4, 1, powers=HALVES.value)
EARLY = ("lengths", "extra_lengths", "positions")  # read before the kernel waits


def plan(problem: Problem, device: Device) -> Plan:
    return attention_plan(problem, device, sparse_mla_sm100_kernel, CONFIG, early=EARLY)


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
    for name in ("q", "cache", "extra_cache"):
        if problem.has(name) and not problem.specs[name].on_multiples(16, (0, 1) if name == "q" else (0,)):
            return f"over rows of {problem.called(name)} between multiples of 16 bytes"
    return None


CONDITIONS = (
    on_gpus(100, 103),
    Condition(" or ".join(repr(layout.name) for layout in FORMATS) + " entries", _other_format),
    Condition("bfloat16 queries over packed entries", _other_queries),
    Condition("one source, or two of one format", _mixed_sources),
    Condition("rows on multiples of 16 bytes", _between_rows),
)
# Asked for by its own name alone: it has run on no GPU.
IMPLEMENTATION = Implementation("gluon_sm100", plan, CONDITIONS, "gluon_sm100", by_name=True)
