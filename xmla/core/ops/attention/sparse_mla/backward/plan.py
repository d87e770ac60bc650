from dataclasses import dataclass

from xmla.core.call import Problem
from xmla.core.ops.attention.sparse_mla.backward.constants import EntryProducts, QueryProducts
from xmla.core.ops.attention.sparse_mla.backward.kernels import (
    sparse_mla_dcache_any_order_kernel,
    sparse_mla_dcache_kernel,
    sparse_mla_dq_kernel,
)
from xmla.core.ops.attention.sparse_mla.backward.packed import unpacking
from xmla.core.ops.attention.sparse_mla.backward.stages import (
    around,
    entries_of,
    in_any_order,
    product_constants,
    sources_of,
)
from xmla.core.ops.attention.sparse_mla.constants import Source
from xmla.core.plan import Implementation, Launch, Plan, most_registers
from xmla.core.values import Device, cdiv


@dataclass(frozen=True, slots=True)
class Tile:
    """Heads against keys of a program, and its warps."""

    block_h: int
    block_n: int
    num_warps: int = 8


def configure(heads: int, device: Device) -> tuple[Tile, Tile]:
    """The tiles of dq's kernel and of the caches' gradients'."""
    if device.arch != 90:  # larger tiles of the second kernel spill
        return Tile(16, 16 if device.smem_bytes < 128 << 10 else 32), Tile(16, 16)
    return (Tile(16, 32), Tile(16, 32)) if heads <= 16 else (Tile(32, 64), Tile(64, 32))


def plan(problem: Problem, device: Device) -> Plan:
    """Probabilities are computed again from lse. A gradient of entries is summed in integers, or in any order."""
    specs, tokens, extra = problem.specs, problem["T"], problem.has("extra_cache")
    tile, key_tile = configure(problem["H"], device)
    deterministic = problem.attrs.deterministic
    queries = QueryProducts(
        **product_constants(problem, Source.with_lengths(problem)),
        SLOT_STRIDE=specs["slots"].stride(0),
        DETERMINISTIC=deterministic,
        EXTRA=Source.with_lengths(problem, "extra_") if extra else None,
        EXTRA_SLOT_STRIDE=specs["extra_slots"].stride(0) if extra else 0,
        BLOCK_H=tile.block_h,
        BLOCK_N=tile.block_n,
    )
    dq = Launch(
        sparse_mla_dq_kernel,
        grid=(tokens * cdiv(problem["H"], tile.block_h),),
        outputs=("dq",),
        arrays={"lse": "forward_lse"}
        | problem.stand_ins(
            lengths="slots", dlse="forward_lse", extra_cache="cache", extra_slots="slots", extra_lengths="slots"
        ),
        sizes={
            "num_slots": problem["P"] * problem["R"],
            "num_keys": problem["K"],
            "num_extra_slots": problem["EXTRA_P"] * problem["EXTRA_R"] if extra else 0,
            "num_extra_keys": problem["EXTRA_K"] if extra else 0,
        },
        constexprs={"C": queries},
        num_warps=tile.num_warps,
        num_stages=1,
        max_registers=most_registers(tile.num_warps),
    )
    dcaches = [
        Launch(
            sparse_mla_dcache_kernel if deterministic else sparse_mla_dcache_any_order_kernel,
            grid=(tokens * cdiv(specs[f"{source}slots"].shape[1], key_tile.block_n),),
            outputs=("references", "sums") if deterministic else ("sums",),
            arrays={
                **{name: f"{source}{name}" for name in ("cache", "slots", "sums")},
                **({name: f"{source}{name}" for name in ("bounds", "references")} if deterministic else {}),
                "lengths": f"{source}lengths" if problem.has(f"{source}lengths") else f"{source}slots",
                "dlse": "dlse" if problem.has("dlse") else "forward_lse",
                "lse": "forward_lse",
            },
            sizes={
                "num_slots": entries_of(problem, source),
                "num_keys": specs[f"{source}slots"].shape[1],
            },
            constexprs={
                "C": EntryProducts(
                    **product_constants(problem, Source.with_lengths(problem, source)),
                    SLOT_STRIDE=specs[f"{source}slots"].stride(0),
                    DETERMINISTIC=deterministic,
                    BLOCK_H=key_tile.block_h,
                    BLOCK_N=key_tile.block_n,
                    PART=128 if device.arch == 90 else 64,  # of 128 sm_100 spills
                )
            },
            num_warps=key_tile.num_warps,
            num_stages=1,
            max_registers=most_registers(key_tile.num_warps),
        )
        for source in sources_of(problem)
    ]
    if not deterministic:
        return in_any_order(problem, (dq, *dcaches))
    return around(problem, (dq, *dcaches), additions=1, paired=False)


IMPLEMENTATION = Implementation("triton", unpacking(plan))
