from dataclasses import dataclass
from functools import partial

from xmla.core.call import Problem
from xmla.core.formats.mla import V32, MlaLayout
from xmla.core.ops.attention.sparse_mla.constants import Attention
from xmla.core.ops.attention.sparse_mla.kernels import sparse_mla_kernel
from xmla.core.ops.attention.sparse_mla.splits import Config, attention_plan
from xmla.core.plan import Implementation, Plan
from xmla.core.values import Device

MAX_HEADS = 128


@dataclass(frozen=True, slots=True)
class PortableConfig(Config):
    """`hoist`: allow loop-invariant code motion, which keeps descriptors of operands in registers."""

    hoist: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableAttention(Attention):
    """Constants of the portable kernel."""

    BLOCK_N: int  # keys of a tile
    HOIST: bool  # whether to allow loop-invariant code motion out of the loop over keys
    HIDE_BYTES: bool  # lang.numbers.hidden


def configure(heads: int, query: str, layout: MlaLayout, extra: MlaLayout | None, device: Device) -> PortableConfig:
    """The tile for this many heads and queries of this dtype: as wide as registers and shared memory allow."""
    if device.smem_bytes < 200 << 10:  # products by mma.sync
        block_h = 16 if heads <= 16 else 32
        if extra not in (None, layout):  # each source has buffers of its own
            return PortableConfig(16, 16, 8, 2)
        if layout.packed:  # 32 heads: 567 against 963 µs by 16 as SM12x's code on an H100, 64 tokens of 128 heads
            return PortableConfig(block_h, 32, 8, 2)
        return PortableConfig(16, 64, 4, 2, hoist=True)  # 368 against 681 µs with (16, 32, 8, 2), likewise
    # Timed on an H200 with code motion; all other cases spill with it, on sm_90 and on sm_100.
    hoist = device.arch == 90 and extra is None and query == "bfloat16" and (layout == V32 or not layout.packed)
    if heads <= 16:
        if device.arch == 90 and extra is None and not layout.packed:
            # 496 against 911 µs with 8 warps, 3 stages (H200, 2026-11-21)
            return PortableConfig(16, 64, 4, 2, hoist=hoist)
        return PortableConfig(16, 64, 8, 3 if extra is None else 2, hoist=hoist)
    if device.arch >= 100:  # accumulators in tensor memory; 64 keys of plain rows pass 227 KB
        return PortableConfig(64, 32, 8, 2)
    if extra is not None or (layout.packed and layout != V32):  # 64 keys spill
        return PortableConfig(64, 32, 8, 3)
    # sm_90: 206 TFLOP/s on an H200, 2026-11-21. Tiles of 32 heads spill and miss wgmma; plain rows take 72 KB a stage.
    return PortableConfig(64, 64, 8, 3 if layout.packed else 2, hoist=hoist)


def plan(problem: Problem, device: Device) -> Plan:
    # A head's bits depend on its tile: tensor-parallel ranks use the tile of all heads.
    heads = MAX_HEADS if problem.attrs.batch_invariant else problem["H"]
    layout, extra = problem.formats["cache"], problem.formats.get("extra_cache")
    config = configure(heads, problem.specs["q"].dtype, layout, extra, device)
    packed = layout.packed or (extra is not None and extra.packed)
    constants = partial(
        PortableAttention,
        BLOCK_N=config.block_n,
        HOIST=config.hoist,
        HIDE_BYTES=packed and device.hides_bytes(config.block_h),
    )
    return attention_plan(problem, device, sparse_mla_kernel, config, constants)


IMPLEMENTATION = Implementation("triton", plan)
