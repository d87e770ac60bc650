from xmla.core.call import Problem
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V4, V32
from xmla.core.ops.attention.sparse_mla.conditions import BFLOAT16_QUERIES, between_rows, entries_of, one_format
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


ROWS = {"q": 16, "cache": 16, "extra_cache": 16}  # bytes, on whose multiples rows begin
CONDITIONS = (
    on_gpus(100, 103),
    entries_of(FORMATS),
    BFLOAT16_QUERIES,
    one_format(),
    Condition("rows on multiples of 16 bytes", lambda problem, _: between_rows(problem, ROWS)),
)
# Asked for by its own name alone: it has run on no GPU.
IMPLEMENTATION = Implementation("gluon_sm100", plan, CONDITIONS, "gluon_sm100", by_name=True)
