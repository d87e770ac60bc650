"""What SM12x's kernels of attention share: the tile, copies of entries, the sum of scores, rotation."""

from typing import Any, NamedTuple

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    ROPE_DIMS,
    VALUE_DIMS,
    entry_pointers,
    exponent_for_half,
)

GROUPS = gl.constexpr(4)  # of dims: a quarter of the roped ones fills the 16 of an mma.sync
GROUP_DIMS = gl.constexpr(VALUE_DIMS.value // GROUPS.value)
BLOCK_N = gl.constexpr(32)  # keys of a tile
WARPS = gl.constexpr(8)

WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [WARPS.value, 1], [1, 0]))  # of entries: eight lanes copy one
ROWS = gl.constexpr(gl.SliceLayout(1, WORDS.value))
SMEM_WORDS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # 16 bytes at once, as below
SMEM_HALVES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SMEM_DENSE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SMEM_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SMEM_PARTS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
SMEM_P = gl.constexpr(gl.SwizzledSharedLayout(8, 64 // BLOCK_N.value, BLOCK_N.value // 8, [1, 0]))


class Copied(NamedTuple):
    """Tiles of entries in shared memory, a stage each."""

    latent: Any  # [STAGES, BLOCK_N, words] i32: the dims that attention uses as values
    rope: Any  # [STAGES, BLOCK_N, ROPE_DIMS / 2] i32, if they are apart
    scales: Any  # [STAGES, BLOCK_N, words] i32 if packed
    valid: Any  # [STAGES, BLOCK_N] i32: whether the slot is valid


@gluon.constexpr_function
def summands(BLOCK_H):
    """The layout of the groups' scores [GROUPS, BLOCK_H, BLOCK_N]: a thread adds its own, a warp has rows of keys."""
    keys = BLOCK_H * BLOCK_N.value // (32 * WARPS.value)
    lanes = BLOCK_N.value // keys
    return gl.BlockedLayout([GROUPS.value, 1, keys], [1, 32 // lanes, lanes], [1, WARPS.value, 1], [2, 1, 0])


@gluon.constexpr_function
def scale_words(LAYOUT):
    """Words that hold an entry's scales."""
    return (LAYOUT.footer or LAYOUT.scales * LAYOUT.scale_bytes) // 4


@gluon.constexpr_function
def rope_is_apart(LAYOUT):
    """Whether an entry's roped dims are copied beside its other dims."""
    return LAYOUT.tail > 0 or LAYOUT.rope_values == "bfloat16"


@gluon.jit
def copy_words(smem, rows, ok, WORDS_READ: gl.constexpr):
    """Start copies from `rows` to `smem` [rows, words] i32, 16 bytes at once: WORDS_READ words if `ok`, then zeros."""
    UNIT: gl.constexpr = min(smem.shape[1], 4)
    word = gl.expand_dims(gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, rows.type.layout.parent)), 0)
    ptrs = gl.expand_dims(rows.to(gl.pointer_type(gl.int32), bitcast=True), 1) + word
    mask, ptrs = gl.broadcast(gl.expand_dims(ok, 1), ptrs)
    if smem.shape[1] > WORDS_READ:
        mask &= word < WORDS_READ
    # The plan demands entries on 16 bytes, which the compiler cannot prove of two sources.
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [4 * UNIT, 4 * UNIT]), [1, UNIT])
    async_copy.async_load(smem, ptrs, mask=mask)


@gluon.jit
def copy_tile(copied, stage, main, extra, main_tiles, tile, slot, C: gl.constexpr):
    """Start the copies of a tile's entries at `slot`, and note which slots are valid."""
    entries, scales, ok = entry_pointers(main, extra, main_tiles, tile, slot, C)
    copied.valid.index(stage).store(ok.to(gl.int32))
    LAYOUT: gl.constexpr = C.LAYOUT
    copy_words(copied.latent.index(stage), entries, ok, LAYOUT.quantized // 4 if LAYOUT.packed else VALUE_DIMS // 2)
    if rope_is_apart(LAYOUT):
        copy_words(copied.rope.index(stage), entries + LAYOUT.rope_offset, ok, ROPE_DIMS // 2)
    if LAYOUT.packed:
        copy_words(copied.scales.index(stage), scales, ok, scale_words(LAYOUT))
    async_copy.commit_group()


@gluon.jit
def by_row(factor):
    """factor [BLOCK_H] broadcastable to [GROUPS, BLOCK_H, …]."""
    return gl.expand_dims(gl.expand_dims(factor, 0), 2)


@gluon.jit
def rotate_back(out, rotation, ROPE: gl.constexpr):
    """The inverse rope on the last ROPE columns of out [BLOCK_H, VALUE_DIMS], which rotates adjacent pairs."""
    HEADS: gl.constexpr = out.shape[0]
    PARTS: gl.constexpr = VALUE_DIMS // ROPE
    even, odd = gl.split(gl.reshape(out, (HEADS, PARTS, ROPE // 2, 2)))
    PAIRS: gl.constexpr = even.type.layout
    offs = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, PAIRS)))
    mask = offs < gl.where(rotation.known, ROPE // 2, 0)
    cos = gl.load(rotation.cos_sin + offs, mask=mask, other=1.0).to(gl.float32)
    sin = gl.load(rotation.cos_sin + ROPE // 2 + offs, mask=mask, other=0.0).to(gl.float32)
    cos = gl.expand_dims(gl.expand_dims(cos, 0), 0)
    sin = gl.expand_dims(gl.expand_dims(sin, 0), 0)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    is_rope = gl.expand_dims(gl.expand_dims(part, 0), 2) == PARTS - 1
    turned_even = gl.where(is_rope, even * cos + odd * sin, even)
    turned_odd = gl.where(is_rope, odd * cos - even * sin, odd)
    return gl.convert_layout(
        gl.reshape(gl.join(turned_even, turned_odd), (HEADS, VALUE_DIMS)), out.type.layout, assert_trivial=True
    )


@gluon.jit
def over_powers(out, task, C: gl.constexpr):
    """A split's results [GROUPS, BLOCK_H, GROUP_DIMS] over a power of two of each group, which is stored."""
    BLOCK_H: gl.constexpr = C.BLOCK_H
    exponent = exponent_for_half(out, 2)  # [GROUPS, BLOCK_H]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(1, exponent.type.layout))
    head = task.head_block * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, exponent.type.layout))
    ptrs = task.lse_row + gl.expand_dims((1 + group) * C.HEADS, 1) + gl.expand_dims(head, 0)
    gl.store(ptrs, power_of_two(exponent), mask=gl.expand_dims(head < C.HEADS, 0))
    return out * gl.expand_dims(power_of_two(-exponent), 2)
