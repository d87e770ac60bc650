from dataclasses import dataclass

from xmla.core.device import Device
from xmla.core.implementation import Condition, Implementation
from xmla.core.ops.sparse_mla.backward.constants import Products
from xmla.core.ops.sparse_mla.backward.gluon_sm90.any_order import sparse_mla_backward_any_order_sm90_kernel
from xmla.core.ops.sparse_mla.backward.gluon_sm90.common import PIECE_DIMS
from xmla.core.ops.sparse_mla.backward.gluon_sm90.kernel import TILE_KEYS, sparse_mla_backward_sm90_kernel
from xmla.core.ops.sparse_mla.backward.stages import around, in_any_order, product_constants
from xmla.core.ops.sparse_mla.gluon_sm90.common import TILE_HEADS
from xmla.core.plan import Launch, Plan, cdiv, next_power_of_2
from xmla.core.problem import Problem

MMA_K = 16  # of a wgmma's 16-bit operands


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
    def SUMMED_HEADS(self) -> int:
        """Heads over which entries' gradients are summed, a power of two: rows past the last head are zeros."""
        return min(max(next_power_of_2(self.HEADS), MMA_K), TILE_HEADS.value)


def plan(problem: Problem, device: Device) -> Plan:
    """One kernel for all products."""
    deterministic = problem.attrs.deterministic
    constants = HopperProducts(**product_constants(problem))
    products = Launch(
        sparse_mla_backward_sm90_kernel if deterministic else sparse_mla_backward_any_order_sm90_kernel,
        grid=(problem["T"] * constants.HEAD_BLOCKS,),
        outputs=("references", "sums", "dq") if deterministic else ("sums", "dq"),
        arrays={"lse": "forward_lse"} | problem.stand_ins(lengths="slots", dlse="forward_lse"),
        sizes={
            "num_slots": problem["P"] * problem["R"],
            "num_keys": problem["K"],
            "slot_stride": problem.specs["slots"].stride(0),
        },
        constexprs={"C": constants},
        num_stages=1,
    )
    if not deterministic:
        return in_any_order(problem, (products,), fours=True)
    tile_keys = TILE_KEYS.value
    touched = cdiv(problem["K"], tile_keys) * tile_keys  # an invalid slot's is the entry of its place in the list
    return around(problem, (products,), additions=constants.HEAD_BLOCKS, paired=True, touched=touched)


def _between_rows(problem: Problem, device: Device) -> str | None:
    for name, axes in (("q", (0, 1)), ("dout", (0, 1)), ("cache", (0,))):
        if not problem.specs[name].on_multiples(16, axes):
            return f"over rows of {name} between multiples of 16 bytes"
    return None


def _without_entries(problem: Problem, device: Device) -> str | None:
    # Zeros for invalid slots are added to an entry, too.
    return None if problem["P"] * problem["R"] else "over a cache without entries"


CONDITIONS = (
    Condition("compute capability 9.0", lambda problem, device: None if device.arch == 90 else f"on {device.name}"),
    Condition("bfloat16", lambda problem, device: f"in {d}" if (d := problem.specs["q"].dtype) != "bfloat16" else None),
    Condition("one source", lambda problem, device: "with extra_cache" if problem.has("extra_cache") else None),
    Condition("a cache with entries", _without_entries),
    Condition("rows on multiples of 16 bytes", _between_rows),
)
IMPLEMENTATION = Implementation("gluon_sm90", plan, CONDITIONS, "gluon")
