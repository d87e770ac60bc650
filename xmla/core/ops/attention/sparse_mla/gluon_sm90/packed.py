"""Attention over V3.2's, V4's and NVFP4's packed entries on Hopper, in Gluon.

A CTA computes TILE_HEADS heads of a token, one tile of keys after the other; the tiles of a second source follow those
of the first. Three warpgroups exchange tiles through shared memory and mbarriers:
- The producer (packed_producer_v32.py, …_v4.py, …_nvfp4.py) gathers entries, converts e4m3 or e2m1 to float16 and
  stores them in one of two stages.
- The left consumer (packed_consumers.py) computes S = Q·Kᵀ and its softmax, hands P and the rescaling factor to the
  other, and computes the left half of the columns of P·V.
- The right consumer computes the right half, and prefetches entries into the L2 cache.
The halves of a stage have barriers of their own: the left half is free as soon as its P·V is done. Over V3.2 the right
P·V runs during the next softmax, when nothing else uses the tensor cores. An arrow goes from who arrives at a barrier
to who waits for it:

              producer                      left consumer                    right consumer
    tile t    left half  → full[0] ───────► S(t), once full[1] is complete
              right half → full[1] ───┐     softmax(t)
              gather of t + 1 starts  │     P, factor → p_full ────────────► P, factor to registers → p_empty
                                      │     P·V left(t), S(t + 1) → s_done ► (V3.2)
                                      └────────────────────────────────────► P·V right(t)
              left half of t + 2  ◄──────── → empty[0]                       prefetch of t + 3
              right half of t + 2 ◄───────────────────────────────────────── → empty[1]

Numbers: float16 holds e4m3 exactly. An entry is divided by 2**e, the largest of its scales rounded down to a power of
two, and a row of Q by such a power too; scores are multiplied by both in float32. The values stay divided, so the
probabilities carry 2**e instead: they are 2**(score + e − maximum), with the maximum over score + e. V4's roped dims
are values too and in float16 as well: there 2**e is also at least 2**-8 of the largest of them. NVFP4's e is always 8.

Register spilling decides the speed. A register spilled inside a loop waits for every load in flight: loads share few
scoreboards, and gathers leave nothing in the L1 cache. A conversion on the slow unit waits as well. V4 has no roped
keys in shared memory, which leaves room for raw bytes: most of an entry comes by `cp.async`, which takes neither
registers nor scoreboards. See benchmarks/log/sparse_mla_decode.md and sparse_mla_v4.md.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from xmla.core.lang.gluon import gl, gluon
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    HALF_DIMS,
    ROPE_DIMS,
    STAGES,
    TILE_HEADS,
    TILE_KEYS,
    VALUE_DIMS,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.packed_consumers import attend_left, attend_right, holds_back
from xmla.core.ops.attention.sparse_mla.gluon_sm90.packed_producer_nvfp4 import produce_nvfp4
from xmla.core.ops.attention.sparse_mla.gluon_sm90.packed_producer_v4 import (
    BLOCK_WORDS,
    LEFT_BLOCKS,
    RAW_BLOCKS,
    produce_v4,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.packed_producer_v32 import produce_v32

# Registers per thread of the right consumer and of the producer; the left consumer has the 216 that remain. Fewer than
# 176 or 112 spill inside loops.
RIGHT_REGISTERS = gl.constexpr(176)
PRODUCER_REGISTERS = gl.constexpr(112)


class Shared(NamedTuple):
    """Shared memory and its mbarriers; left and right are the halves of the VALUE_DIMS."""

    q: Any  # [half, TILE_HEADS, HALF_DIMS] f16
    q_rope: Any  # V3.2: [TILE_HEADS, ROPE_DIMS] bf16
    entries: Any  # [stage · 2 + half, TILE_KEYS, HALF_DIMS] f16
    rope: Any  # V3.2: [stage, TILE_KEYS, ROPE_DIMS] bf16
    raw: Any  # V4: left, right: [block, TILE_KEYS, BLOCK_WORDS] i32, the bytes of blocks not yet converted
    p: Any  # [TILE_HEADS, TILE_KEYS] f16
    exponent: Any  # [stage, TILE_KEYS] i32: e of each entry
    valid: Any  # [stage, TILE_KEYS] f32: −inf if the slot is invalid, else e
    seen: Any  # [TILE_KEYS] i32: whether any tile had a valid slot in this row
    factor: Any  # [TILE_HEADS] f32: of scores before the first tile, then what P·V so far is rescaled by
    full: Any  # left, right: [stage]; producer → consumers
    empty: Any  # left, right: [stage]; consumer of this half → producer
    s_done: Any  # left → right, if P·V is held back: S of each tile but the first is computed
    q_full: Any  # both consumers → left
    p_full: Any  # left → right: P and factor
    p_empty: Any  # right → left


@gluon.jit
def attend_packed(main, extra, main_tiles, tiles, task, C: gl.constexpr):
    """Attention of TILE_HEADS heads of a token over packed entries."""
    LAYOUT: gl.constexpr = C.LAYOUT
    gl.static_assert(LAYOUT.dims - LAYOUT.tail == VALUE_DIMS, "the two consumers have the columns of 512 value dims")
    ROPE_VALUES: gl.constexpr = "e4m3" if LAYOUT.values == "e2m1" else "bfloat16"
    gl.static_assert(
        LAYOUT.rope == ROPE_DIMS and LAYOUT.rope_values == ROPE_VALUES,
        "packed entries have 64 roped dims, e4m3 beside e2m1 and else bf16",
    )
    SMEM_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SMEM_V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SMEM_R: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    q_smem = gl.allocate_shared_memory(gl.float16, [2, TILE_HEADS, HALF_DIMS], SMEM_L)
    entries_smem = gl.allocate_shared_memory(gl.float16, [STAGES * 2, TILE_KEYS, HALF_DIMS], SMEM_L)
    if LAYOUT.tail:
        q_rope_smem = gl.allocate_shared_memory(gl.bfloat16, [TILE_HEADS, ROPE_DIMS], SMEM_L)
        rope_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE_KEYS, ROPE_DIMS], SMEM_L)
        raw_smem: gl.constexpr = None
    else:
        q_rope_smem: gl.constexpr = None
        rope_smem: gl.constexpr = None
        raw_left_smem = gl.allocate_shared_memory(gl.int32, [LEFT_BLOCKS, TILE_KEYS, BLOCK_WORDS], SMEM_R)
        RIGHT_BLOCKS: gl.constexpr = RAW_BLOCKS - LEFT_BLOCKS
        raw_right_smem = gl.allocate_shared_memory(gl.int32, [RIGHT_BLOCKS, TILE_KEYS, BLOCK_WORDS], SMEM_R)
        raw_smem = raw_left_smem, raw_right_smem
    if holds_back(LAYOUT):
        s_done = mbarrier.allocate_mbarrier()
        mbarrier.init(s_done, count=1)
    else:
        # None is made that no warpgroup uses. Its memory would hold what `warp_specialize` hands over, which the
        # initialisation, not ordered with other stores, can overwrite: pointers of slots then point anywhere.
        s_done: gl.constexpr = None
    shared = Shared(
        q=q_smem,
        q_rope=q_rope_smem,
        entries=entries_smem,
        rope=rope_smem,
        raw=raw_smem,
        p=gl.allocate_shared_memory(gl.float16, [TILE_HEADS, TILE_KEYS], SMEM_L),
        exponent=gl.allocate_shared_memory(gl.int32, [STAGES, TILE_KEYS], SMEM_V),
        valid=gl.allocate_shared_memory(gl.float32, [STAGES, TILE_KEYS], SMEM_V),
        seen=gl.allocate_shared_memory(gl.int32, [TILE_KEYS], SMEM_V),
        factor=gl.allocate_shared_memory(gl.float32, [TILE_HEADS], SMEM_V),
        full=(mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)),
        empty=(mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)),
        s_done=s_done,
        q_full=mbarrier.allocate_mbarrier(),
        p_full=mbarrier.allocate_mbarrier(),
        p_empty=mbarrier.allocate_mbarrier(),
    )
    for stage in gl.static_range(STAGES):
        for half in gl.static_range(2):
            mbarrier.init(shared.full[half].index(stage), count=1)
            mbarrier.init(shared.empty[half].index(stage), count=1)
    mbarrier.init(shared.q_full, count=2)
    mbarrier.init(shared.p_full, count=1)
    mbarrier.init(shared.p_empty, count=1)

    gl.warp_specialize(
        [
            (attend_left, (tiles, shared, task, C)),
            (attend_right, (main, extra, main_tiles, tiles, shared, task, C)),
            (
                produce_nvfp4 if LAYOUT.values == "e2m1" else produce_v32 if LAYOUT.tail else produce_v4,
                (main, extra, main_tiles, tiles, shared, C),
            ),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )
