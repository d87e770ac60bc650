from dataclasses import dataclass
from functools import partial

from xmla.core.call import Problem
from xmla.core.formats.mla import NVFP4, PLAIN, PLAIN_V4, V4, V32
from xmla.core.ops.attention.sparse_mla.conditions import BFLOAT16_QUERIES, between_rows, entries_of, one_format
from xmla.core.ops.attention.sparse_mla.constants import Attention
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import HALVES, TILE_HEADS, TILE_KEYS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.few_heads import BLOCKS, FEW_HEADS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.kernel import sparse_mla_sm90_kernel
from xmla.core.ops.attention.sparse_mla.splits import Config, attention_plan
from xmla.core.plan import ON_HOPPER, Condition, Implementation, Plan
from xmla.core.values import Device, cdiv, next_power_of_2

FORMATS = (V32, V4, NVFP4, PLAIN, PLAIN_V4)
# The warps are those of the kernel's first partition. Each group of dims has a power of two that its warps know.
WIDE = Config(TILE_HEADS.value, TILE_KEYS.value, 4, 1, powers=HALVES.value)
NARROW = Config(FEW_HEADS.value, TILE_KEYS.value, 4, 1, programs=2, powers=BLOCKS.value)
FEWEST_PLACES, MOST_PLACES = 128, 512  # of tokens that are ordered by their lengths
EARLY = ("q", "lengths", "extra_lengths", "positions")  # read before the kernel waits


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperAttention(Attention):
    """Constants of Hopper's kernel."""

    ORDERED: int  # places for the tokens, if these are computed in the order of their lengths; else 0
    SHARED: bool  # whether a row's splits share out its own length, else K and EXTRA_K as of rows without lengths


def plan(problem: Problem, device: Device) -> Plan:
    config = NARROW if takes_few_heads(problem) else WIDE
    differ = problem.has("lengths") or problem.has("extra_lengths")
    ordered = places_in_order(problem, config, device) if differ else 0
    shared = differ and not problem.attrs.batch_invariant
    constants = partial(HopperAttention, ORDERED=ordered, SHARED=shared)
    return attention_plan(problem, device, sparse_mla_sm90_kernel, config, constants, EARLY)


def places_in_order(problem: Problem, config: Config, device: Device) -> int:
    """Places for the tokens if they are computed in the order of their lengths, which differ; else 0.

    One wave's tokens all start at once, and of many waves the last one's are few.
    """
    tokens, programs = problem["T"], problem["T"] * cdiv(problem["H"], config.block_h)
    if tokens > MOST_PLACES or programs <= device.num_sms * config.programs:
        return 0
    return max(next_power_of_2(tokens), FEWEST_PLACES)


def takes_few_heads(problem: Problem) -> bool:
    """Whether the call gets the tile of 16 heads, which copies V3.2's entries by 16 bytes."""
    if problem["H"] > NARROW.block_h or problem.formats["cache"] != V32 or problem.attrs.batch_invariant:
        return False  # a head's bits depend on its tile: tensor-parallel ranks use the tile of all heads
    return problem.specs["cache"].on_multiples(16, (0,))


def _between_rows(problem: Problem, device: Device) -> str | None:
    # Copies are of 16 bytes. V3.2's entries are read by words, as by every reader, and so are queries that are
    # converted while they are copied.
    layout = problem.formats["cache"]
    units = {"q": 4 if layout.packed else 16} | ({} if layout == V32 else {"cache": 16, "extra_cache": 16})
    return between_rows(problem, units)


CONDITIONS = (
    ON_HOPPER,
    entries_of(FORMATS),
    BFLOAT16_QUERIES,
    one_format(but=(V32, NVFP4)),
    Condition("rows on multiples of 16 bytes, or 4 for queries over packed entries", _between_rows),
)
IMPLEMENTATION = Implementation("gluon_sm90", plan, CONDITIONS, "gluon")
