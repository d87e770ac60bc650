from dataclasses import dataclass, replace
from math import prod

from xmla.core.call import Problem
from xmla.core.ops.attention.sparse_mla.backward.constants import Products
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.any_order import (
    TAIL_DIMS,
    sparse_mla_backward_any_order_sm90_kernel,
)
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.common import PIECE_DIMS
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.kernel import TILE_KEYS, sparse_mla_backward_sm90_kernel
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.order import MOST_KEYS, order_slots_kernel
from xmla.core.ops.attention.sparse_mla.backward.packed import over_rows, unpacking
from xmla.core.ops.attention.sparse_mla.backward.stages import around, in_any_order, product_constants
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import TILE_HEADS, VALUE_DIMS
from xmla.core.plan import ON_HOPPER, Condition, Implementation, Launch, Plan, Rows, divided
from xmla.core.values import Device, Spec, cdiv, next_power_of_2

MMA_K = 16  # of a wgmma's 16-bit operands
ORDERED_ROWS = 8  # of slots at a time
BYTES_OF_AN_ELEMENT = 2 + 4  # of an entry, and of its sum or that of low parts
CACHED_BYTES = 32 << 20  # of entries and sums; more exceed the L2 cache, of which an H100 has 50 MB
WAVES = 4  # of CTAs in a launch: 8 take up to 17 % longer on an H100, all up to 83 %


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperProducts(Products):
    """Constants of either kernel for Hopper."""

    @property
    def HEAD_BLOCKS(self) -> int:
        return cdiv(self.HEADS, TILE_HEADS.value)

    @property
    def PIECES(self) -> int:
        """Pieces of an entry's dims."""
        return self.LAYOUT.dims // PIECE_DIMS.value

    @property
    def SUM_DIMS(self) -> int:
        """Dims that are summed over heads at a time in any order: with 64 beside roped dims wgmma is serialised."""
        return TAIL_DIMS.value if self.LAYOUT.tail else PIECE_DIMS.value

    @property
    def SUM_PIECES(self) -> int:
        """Pieces of so many dims of a value."""
        return VALUE_DIMS.value // self.SUM_DIMS

    @property
    def SUMMED_HEADS(self) -> int:
        """Heads over which entries' gradients are summed, a power of two: rows past the last head are zeros."""
        return min(max(next_power_of_2(self.HEADS), MMA_K), TILE_HEADS.value)


def tokens_of_a_launch(problem: Problem, device: Device, head_blocks: int) -> int:
    """Tokens for WAVES CTAs on each SM where entries and their sums exceed the L2 cache, else all tokens.

    CTAs take keys in one order, but after some waves those that run beside each other are anywhere in it.
    """
    cache = problem.specs["cache"]
    if prod(cache.shape) * BYTES_OF_AN_ELEMENT <= CACHED_BYTES:
        return max(problem["T"], 1)
    return max(WAVES * device.num_sms // head_blocks, 1)


def plan(problem: Problem, device: Device) -> Plan:
    """Slots in order, then one kernel for all products."""
    deterministic, tokens = problem.attrs.deterministic, problem["T"]
    constants = HopperProducts(**product_constants(problem))
    order = Launch(
        order_slots_kernel,
        grid=(tokens,),
        outputs=("ordered", "ends"),
        arrays=problem.stand_ins(lengths="slots"),
        sizes={
            "num_slots": problem["P"] * problem["R"],
            "num_keys": problem["K"],
            "slot_stride": problem.specs["slots"].stride(0),
        },
        constexprs={"HAS_LENGTHS": problem.has("lengths"), "ROWS": ORDERED_ROWS},
    )
    most = tokens_of_a_launch(problem, device, constants.HEAD_BLOCKS)
    products = Launch(
        sparse_mla_backward_sm90_kernel if deterministic else sparse_mla_backward_any_order_sm90_kernel,
        grid=(min(most, tokens) * constants.HEAD_BLOCKS,),
        outputs=("references", "sums", "dq") if deterministic else ("sums", "dq"),
        arrays={"lse": "forward_lse", "slots": "ordered"} | problem.stand_ins(dlse="forward_lse"),
        sizes={"num_slots": problem["P"] * problem["R"], "num_keys": problem["K"], "first_token": 0},
        constexprs={"C": constants},
        num_stages=1,
    )
    launches = [
        replace(products, grid=(rows.count * constants.HEAD_BLOCKS,)).with_sizes(first_token=rows.first)
        for rows in divided(tokens, most) or [Rows(0, 0)]
    ]
    ordered = {"ordered": Spec(problem.specs["slots"].shape, "int32"), "ends": Spec((tokens,), "int32")}
    if not deterministic:
        return in_any_order(problem, (order, *launches), fours=True, workspace=ordered)
    tile_keys = TILE_KEYS.value
    touched = cdiv(problem["K"], tile_keys) * tile_keys  # past a token's slots 0 is added to the entry of that place
    return around(
        problem, (order, *launches), additions=constants.HEAD_BLOCKS, paired=True, touched=touched, workspace=ordered
    )


def _between_rows(problem: Problem, device: Device) -> str | None:
    specs = over_rows(problem).specs
    for name, axes in (("q", (0, 1)), ("dout", (0, 1)), ("cache", (0,))):
        if not specs[name].on_multiples(16, axes):
            return f"over rows of {name} between multiples of 16 bytes"
    return None


def _without_entries(problem: Problem, device: Device) -> str | None:
    # Zeros for invalid slots are added to an entry, too.
    return None if problem["P"] * problem["R"] else "over a cache without entries"


CONDITIONS = (
    ON_HOPPER,
    Condition("bfloat16", lambda problem, device: f"in {d}" if (d := problem.specs["q"].dtype) != "bfloat16" else None),
    Condition("one source", lambda problem, device: "with extra_cache" if problem.has("extra_cache") else None),
    Condition("a cache with entries", _without_entries),
    Condition(f"K ≤ {MOST_KEYS}", lambda p, device: f"with K = {p['K']}" if p["K"] > MOST_KEYS else None),
    Condition("rows on multiples of 16 bytes", _between_rows),
)
IMPLEMENTATION = Implementation("gluon_sm90", unpacking(plan), CONDITIONS, "gluon")
