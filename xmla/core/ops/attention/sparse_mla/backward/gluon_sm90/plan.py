from dataclasses import dataclass, replace
from math import prod

from xmla.core.call import Problem
from xmla.core.formats.mla import MlaLayout
from xmla.core.ops.attention.sparse_mla.backward.constants import Products
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.any_order import (
    TAIL_DIMS,
    sparse_mla_backward_any_order_sm90_kernel,
)
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.common import PIECE_DIMS
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.entries import (
    WARPGROUP_DIMS,
    sparse_mla_backward_dcache_sm90_kernel,
)
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.kernel import TILE_KEYS, sparse_mla_backward_sm90_kernel
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.merge import MOST_COUNTED, TOKENS, merge_slots_kernel
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.order import MOST_KEYS, order_slots_kernel
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.queries import sparse_mla_backward_dq_sm90_kernel
from xmla.core.ops.attention.sparse_mla.backward.packed import over_rows, unpacking
from xmla.core.ops.attention.sparse_mla.backward.stages import around, entries_of, in_any_order, product_constants
from xmla.core.ops.attention.sparse_mla.constants import Pages
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import TILE_HEADS, VALUE_DIMS
from xmla.core.plan import ON_HOPPER, Condition, Constants, Implementation, Launch, Plan, Rows, clear, divided
from xmla.core.values import Device, Spec, cdiv, next_power_of_2

MMA_K = 16  # of a wgmma's 16-bit operands
ORDERED_ROWS = 8  # of slots at a time
BYTES_OF_AN_ELEMENT = 2 + 4  # of an entry, and of its sum or that of low parts
CACHED_BYTES = 32 << 20  # of entries and sums; more exceed the L2 cache, of which an H100 has 50 MB
FEW_HEADS = MMA_K  # at most, whose tokens' summands are added together: more take longer than a token a tile
LEAST_KEYS = 1024  # of a token, for that: fewer random keys are rarely those of its neighbours
MOST_ENTRIES = 1 << 17  # of which a program reads all between a group's least and greatest
COUNTERS = 2  # programs on an SM that count the slots of groups
COUNTED_BYTES = 64 << 20  # of all programs' counts
ADDING_REGISTERS = 168  # of a thread, so that three CTAs fit on an SM
ADDITIONS = 2  # to low words for a slot that names an entry, at most
FACTORS_BYTES = 256 << 20  # of P and dS that are kept
WAVES = 4  # of CTAs in a launch: 8 take up to 17 % longer on an H100, all up to 83 %


def summed_heads(heads: int) -> int:
    """Heads over which entries' gradients are summed, a power of two: rows past the last head are zeros."""
    return min(max(next_power_of_2(heads), MMA_K), TILE_HEADS.value)


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
        return summed_heads(self.HEADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedEntries(Constants):
    """Constants of the kernel that adds what a few tokens give an entry."""

    HEADS: int
    Q_STRIDE_T: int
    Q_STRIDE_H: int
    DOUT_STRIDE_T: int
    DOUT_STRIDE_H: int
    LAYOUT: MlaLayout

    @property
    def SUMMED_HEADS(self) -> int:
        return summed_heads(self.HEADS)

    @property
    def WARPGROUPS(self) -> int:
        """Warpgroups of a CTA. Three CTAs of one fit on an SM, and are sooner than one of two."""
        return 1

    @property
    def PART_DIMS(self) -> int:
        """Dims of a CTA."""
        return self.WARPGROUPS * WARPGROUP_DIMS.value

    @property
    def PARTS(self) -> int:
        return cdiv(self.LAYOUT.dims, self.PART_DIMS)


def tokens_of_a_launch(problem: Problem, device: Device, head_blocks: int) -> int:
    """Tokens for WAVES CTAs on each SM where entries and their sums exceed the L2 cache, else all tokens.

    CTAs take keys in one order, but after some waves those that run beside each other are anywhere in it.
    """
    cache = problem.specs["cache"]
    if prod(cache.shape) * BYTES_OF_AN_ELEMENT <= CACHED_BYTES:
        return max(problem["T"], 1)
    return max(WAVES * device.num_sms // head_blocks, 1)


def merges(problem: Problem) -> bool:
    """Whether heads are few, and a token's slots enough to be shared and few enough to be counted.

    The number of tokens does not matter, so that the order of a token's keys, and with it the bits of dq, do not follow
    from the batch.
    """
    few, keys = problem["H"] <= FEW_HEADS, problem["K"]
    return few and LEAST_KEYS <= keys <= MOST_COUNTED.value and entries_of(problem, "") <= MOST_ENTRIES


def merged(problem: Problem, device: Device) -> Plan:
    """Slots in order and merged, dq, then the entries' gradients of a few tokens at once; for some tokens at a time."""
    tokens, keys, entries = problem["T"], problem["K"], entries_of(problem, "")
    constants = HopperProducts(**product_constants(problem, Pages.of(problem)))
    adding = MergedEntries(
        HEADS=constants.HEADS,
        Q_STRIDE_T=constants.Q_STRIDE_T,
        Q_STRIDE_H=constants.Q_STRIDE_H,
        DOUT_STRIDE_T=constants.DOUT_STRIDE_T,
        DOUT_STRIDE_H=constants.DOUT_STRIDE_H,
        LAYOUT=constants.LAYOUT,
    )
    group = TOKENS.value
    of_a_token = max(keys * 2 * constants.SUMMED_HEADS * 2, 1)
    most = max(FACTORS_BYTES // of_a_token // group, 1) * group
    most_groups = cdiv(min(most, tokens), group)
    programs = max(min(most_groups, COUNTERS * device.num_sms, COUNTED_BYTES // (16 * entries)), 1)
    merge = Launch(
        merge_slots_kernel,
        grid=(programs,),
        outputs=("counts", "ordered", "ends", "places", "units", "ranks", "merged_ends"),
        arrays=problem.stand_ins(lengths="slots"),
        sizes={
            "num_slots": entries, "num_keys": keys, "slot_stride": problem.specs["slots"].stride(0),
            "num_tokens": tokens, "first_token": 0, "num_groups": 0,
        },
        constexprs={"ADDITIONS": ADDITIONS, "HAS_LENGTHS": problem.has("lengths"), "BLOCK": 1024},
        num_warps=8,
    )  # fmt: skip
    dq = Launch(
        sparse_mla_backward_dq_sm90_kernel,
        grid=(0,),
        outputs=("references", "factors", "dq"),
        arrays={"lse": "forward_lse"} | problem.stand_ins(dlse="forward_lse"),
        sizes={"num_keys": keys, "first_token": 0},
        constexprs={"C": constants},
        num_stages=1,
    )
    dcache = Launch(
        sparse_mla_backward_dcache_sm90_kernel,
        grid=(0,),
        outputs=("sums",),
        sizes={"num_keys": keys, "num_tokens": tokens, "first_token": 0},
        constexprs={"C": adding},
        num_warps=4 * adding.WARPGROUPS,
        num_stages=1,
        max_registers=ADDING_REGISTERS,
    )
    launches = [clear("counts", programs * entries * 4)]
    for rows in divided(tokens, most) or [Rows(0, 0)]:
        groups = cdiv(rows.count, group)
        launches += [
            replace(merge, grid=(min(programs, groups),)).with_sizes(first_token=rows.first, num_groups=groups),
            replace(dq, grid=(rows.count,)).with_sizes(first_token=rows.first),
            replace(dcache, grid=(groups * adding.PARTS,)).with_sizes(first_token=rows.first),
        ]
    workspace = {
        "counts": Spec((programs, entries, 4), "int32"),
        "ordered": Spec((most_groups * group, keys), "int32"),
        "ends": Spec((most_groups * group,), "int32"),
        "places": Spec((most_groups, group * keys), "int32"),
        "units": Spec((most_groups, group * keys), "int32"),
        "ranks": Spec((most_groups, group, group * keys), "int32"),
        "merged_ends": Spec((most_groups,), "int32"),
        "factors": Spec((most_groups * group, keys, 2, constants.SUMMED_HEADS), "bfloat16"),
    }
    return around(problem, launches, additions=ADDITIONS, paired=False, workspace=workspace)


def plan(problem: Problem, device: Device) -> Plan:
    """Slots in order, then one kernel for all products."""
    if problem.attrs.deterministic and merges(problem):
        return merged(problem, device)
    deterministic, tokens = problem.attrs.deterministic, problem["T"]
    constants = HopperProducts(**product_constants(problem, Pages.of(problem)))
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
