from dataclasses import dataclass
from typing import Any

from xmla.core.call import Problem
from xmla.core.formats.mla import NVFP4, PLAIN, PLAIN_V4, V4, V32
from xmla.core.ops.attention.sparse_mla.conditions import BFLOAT16_QUERIES, between_rows, entries_of, one_format
from xmla.core.ops.attention.sparse_mla.constants import Attention
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import HALVES, TILE_HEADS, TILE_KEYS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.few_heads import BLOCKS, FEW_HEADS
from xmla.core.ops.attention.sparse_mla.gluon_sm90.kernel import sparse_mla_sm90_kernel
from xmla.core.ops.attention.sparse_mla.splits import Config, attention_plan
from xmla.core.plan import ON_HOPPER, Condition, Implementation, Plan
from xmla.core.values import Device, arithmetic, cdiv, larger, next_power_of_2

FORMATS = (V32, V4, NVFP4, PLAIN, PLAIN_V4)
# The warps are those of the kernel's first partition. Each group of dims has a power of two that its warps know.
WIDE = Config(TILE_HEADS.value, TILE_KEYS.value, 4, 1, powers=HALVES.value, alone=True)
NARROW = Config(FEW_HEADS.value, TILE_KEYS.value, 4, 1, programs=2, powers=BLOCKS.value)
FEWEST_PLACES, MOST_PLACES = 128, 512  # of tokens that are ordered by their lengths
FEWEST_DEALT = 32  # places of tokens that CTAs are dealt out among
EARLY = ("q", "lengths", "extra_lengths", "positions")  # read before the kernel waits


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperAttention(Attention):
    """Constants of Hopper's kernel."""

    PLACES: int  # for the tokens, if these are ordered by their lengths or CTAs are dealt out among them; else 0
    DEALT: bool  # whether all rows' CTAs have as many tiles, so that long rows have more of them
    FIRST_AHEAD: int  # the first tile whose entries are prefetched
    SHARED: bool  # whether a row's splits share out its own length, else K and EXTRA_K as of rows without lengths


def plan(problem: Problem, device: Device) -> Plan:
    config = NARROW if takes_few_heads(problem) else WIDE
    differ = problem.has("lengths") or problem.has("extra_lengths")
    shared = differ and not problem.attrs.batch_invariant
    # By their number the first source's keys, a window or a selection, seldom differ: 16 requests of V3.2's 2048 keys
    # take 33.4 µs dealt out and 32.9 otherwise (H200, 2026-11-30).
    dealt = shared and problem.has("extra_lengths")
    # A launch that starts before its slots are there gains 0.3 to 0.5 µs, another loses 0.2 (likewise).
    first_ahead = 0 if "slots" in problem.written and problem.formats["cache"] == V32 else 1

    def constants(DEALT: bool, **of_call: Any) -> HopperAttention:
        places = larger(next_power_of_2(problem["T"]), FEWEST_DEALT) if DEALT else 0
        if differ and not DEALT:
            places = places_in_order(problem["T"], problem["T"] * cdiv(problem["H"], config.block_h), config, device)
        return HopperAttention(**of_call, PLACES=places, DEALT=DEALT, SHARED=shared, FIRST_AHEAD=first_ahead)

    return attention_plan(problem, device, sparse_mla_sm90_kernel, config, constants, EARLY, dealt)


@arithmetic
def places_in_order(tokens: int, programs: int, config: Config, device: Device) -> int:
    """Places for the tokens if they are computed in the order of their lengths, which differ; else 0.

    One wave's tokens all start at once, and of many waves the last one's are few.
    """
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
