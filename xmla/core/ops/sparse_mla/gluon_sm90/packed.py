"""Attention over V3.2's and V4's pages on Hopper, in Gluon.

One program: 64 heads of a token against its keys, 64 at a time, on three warpgroups that hand tiles to each other
through shared memory and mbarriers. A second source's tiles follow those of the first.
- `produce` and `produce_v4` gather entries, convert e4m3 to float16 and store them in one of two stages.
- `attend_left` computes S = Q·Kᵀ and its softmax, hands P and the factor that earlier sums shrink by to the other, and
  has the left 256 columns of P·V.
- `attend_right` has the right 256 columns, and fetches entries into the L2 cache three tiles ahead.
The halves of a stage are handed over one by one: the left one is free as soon as its P·V is. Over V3.2 the right one's
runs under the next softmax, when nobody else needs the tensor cores.

Numbers: float16 holds e4m3 exactly. An entry comes divided by 2**e, the largest of its scales rounded down to a power
of two, and a row of Q by such a power too; scores get both back in float32. The values keep the divisor, so the
probabilities carry 2**e instead: they are 2**(score + e − maximum) with the maximum over score + e. V4's roped dims are
values too and in float16 as well: there 2**e is also at least 2**-8 of the largest of them.

What the compiler makes of it decides: a register that spills inside a loop waits for every load in flight (they share
few scoreboards, and gathers leave nothing in the L1 cache), and so does a conversion on the slow unit. Without roped
rows V4 has room for raw bytes in shared memory: most of an entry comes by `cp.async`, which takes neither. See
benchmarks/log/sparse_mla_decode.md and sparse_mla_v4.md.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.gluon import async_copy, gl, gluon
from xmla.core.lang import LOG2E
from xmla.core.offsets import gluon_offset_of as offset_of
from xmla.core.ops.sparse_mla.gluon_sm90.common import (
    O_LAYOUT,
    S_LAYOUT,
    close_sums,
    entry_pointers,
    exponent_of,
    finite_abs,
    hidden_zero,
    load_slots,
    power_of_two,
    scaled,
    small_float,
    store_half,
    sum_in_threads,
)

AHEAD = gl.constexpr(3)  # tiles that entries are fetched into the L2 cache before they are wanted; 5 is slower
# A thread's registers in `attend_right` and `produce`; `attend_left` has the 216 that remain. With fewer than 176, or
# fewer than 112, loops spill.
RIGHT_REGISTERS = gl.constexpr(176)
PRODUCER_REGISTERS = gl.constexpr(112)


class Shared(NamedTuple):
    """Shared memory and its barriers; left and right are halves of the latent dims."""

    q: Any  # left, right: [64, 256] f16
    q_rope: Any  # [64, 64] bf16 over V3.2
    entries: Any  # [stage · 2 + half, 64, 256] f16
    rope: Any  # over V3.2 [stage, 64, 64] bf16, over V4 raw bytes of the left and the right half
    p: Any  # [64, 64] f16
    exponent: Any  # [stage, 64] i32
    valid: Any  # [stage, 64] f32: −inf where there is no key, else the exponent
    seen: Any  # [64] i32: whether there was a key in this row of any tile
    factor: Any  # [64] f32
    full: Any  # left, right: [stage]
    empty: Any  # left, right: [stage]
    s_done: Any  # S of each tile but the first, for which nobody waits
    q_full: Any
    p_full: Any
    p_empty: Any


@gluon.jit
def prefetch(main, extra, main_tiles, tile, slot, C: gl.constexpr):
    """Entries on their way to the L2 cache, a line of 128 bytes at a time."""
    LINES: gl.constexpr = slot.type.layout.parent
    LAYOUT: gl.constexpr = C.LAYOUT
    entries, scales, ok = entry_pointers(main, extra, main_tiles, tile, slot, C)
    line = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, LINES)), 0) * 128
    ptrs, line = gl.broadcast(gl.expand_dims(entries, 1) + line, line)
    END: gl.constexpr = LAYOUT.data + 128 * (LAYOUT.footer > 0)
    if LAYOUT.footer:
        ptrs = gl.where(line < LAYOUT.data, ptrs, gl.expand_dims(scales, 1))
    wanted = gl.expand_dims(ok.to(gl.int32), 1) & (line < END).to(gl.int32)
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }
        """, "=r,l,r", [ptrs.to(gl.int64, bitcast=True), wanted], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_words(entries, ok, OFFSET: gl.constexpr, WORDS: gl.constexpr):
    """256 bytes of each entry as words [64, 2, 2, 16] i32: two groups of 128 bytes."""
    group = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    block = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, WORDS))))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, WORDS))))
    ptrs = gl.expand_dims(entries, 1) + OFFSET + gl.expand_dims(group, 0) * 128  # [64, 2]
    ptrs = gl.expand_dims(ptrs, 2) + gl.expand_dims(gl.expand_dims(block, 0), 0) * 64  # [64, 2, 2]
    ptrs = gl.expand_dims(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), 3)
    ptrs += gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 0), 0)
    mask = gl.expand_dims(gl.expand_dims(gl.expand_dims(ok, 1), 2), 3)
    return gl.load(ptrs, mask=mask, other=0)


@gluon.jit
def load_rope(entries, ok, OFFSET: gl.constexpr, WORDS: gl.constexpr):
    """The 128 bytes of each entry's roped part as words [64, 2, 16] i32."""
    ROPES: gl.constexpr = gl.SliceLayout(1, WORDS)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, ROPES))
    block = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROPES)))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, ROPES)))
    entries = gl.convert_layout(entries, ROWS, assert_trivial=True)
    ok = gl.convert_layout(ok, ROWS, assert_trivial=True)
    ptrs = gl.expand_dims(entries, 1) + OFFSET + gl.expand_dims(block, 0) * 64
    ptrs = gl.expand_dims(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), 2)
    ptrs += gl.expand_dims(gl.expand_dims(word, 0), 0)
    return gl.load(ptrs, mask=gl.expand_dims(gl.expand_dims(ok, 1), 2), other=0)


@gluon.jit
def load_scales(scales, ok, OFFSET: gl.constexpr, WORDS: gl.constexpr):
    """Two scales of each entry, [64, 2] f32."""
    group = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    ptrs = gl.expand_dims((scales + OFFSET).to(gl.pointer_type(gl.float32), bitcast=True), 1)
    return gl.load(ptrs + gl.expand_dims(group, 0), mask=gl.expand_dims(ok, 1), other=0.0)


@gluon.jit
def scale_pairs(scales, exponent):
    """scales [64, 2] / 2**exponent in float16, twice in an i32."""
    ratio = scales * gl.expand_dims(power_of_two(-exponent), 1)
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [ratio], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def to_half(words, twice):
    """e4m3 words [64, 2, 2, 16] times scale pairs [64, 2] in float16: pairs [64, 128] i32."""
    low, high = scale_words(words, gl.expand_dims(gl.expand_dims(twice, 2), 3))
    return gl.reshape(gl.join(low, high), (64, 128))


@gluon.jit
def scale_words(words, twice):
    """e4m3 words times pairs of factors in float16: of each word the low pair and the high one."""
    twice, words = gl.broadcast(twice, words)
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        .reg .b32 x, y;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a;
        cvt.rn.f16x2.e4m3x2 y, b;
        mul.f16x2 $0, x, $3;
        mul.f16x2 $1, y, $3;
        }
        """,
        "=r,=r,r,r", [words, twice], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def scale_rope(words, exponent, WORDS: gl.constexpr):
    """bf16 words [64, 2, 16] divided by 2**exponent: pairs [64, 32] i32."""
    ROPES: gl.constexpr = gl.SliceLayout(1, WORDS)
    factor = gl.convert_layout(
        (127 - exponent) * 0x800080, gl.SliceLayout(1, gl.SliceLayout(2, ROPES)), assert_trivial=True
    )
    factor, words = gl.broadcast(gl.expand_dims(gl.expand_dims(factor, 1), 2), words)
    scaled = gl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $2;", "=r,r,r", [words, factor], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.reshape(scaled, (64, 32))


@gluon.jit
def produce(main, extra, main_tiles, tiles, shared, C: gl.constexpr):
    N: gl.constexpr = 64
    # Eight lanes of a row pair store 16 bytes each without a bank conflict: even chunks of one, odd ones of the other.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 2, 2, 4], [8, 1, 1, 4], [4, 1, 1, 1], [3, 2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS)))
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)

    slot = load_slots(main, extra, main_tiles, 0, ROWS)
    entries, scales, ok = entry_pointers(main, extra, main_tiles, 0, slot, C)
    scales0 = load_scales(scales, ok, 0, WORDS)
    scales1 = load_scales(scales, ok, 8, WORDS)
    words0 = load_words(entries, ok, 0, WORDS)
    slot = load_slots(main, extra, main_tiles, 1, ROWS)
    seen = gl.zeros([N], gl.int32, ROWS)
    for tile in range(0, tiles):
        stage = tile % 2
        exponent = gl.maximum(gl.max(finite_abs(scales0), 1), gl.max(finite_abs(scales1), 1))
        exponent = exponent_of(exponent)  # [64]
        factor0 = scale_pairs(scales0, exponent)
        factor1 = scale_pairs(scales1, exponent)
        # Loads of one part are in flight while another is converted; a whole tile does not fit what shared memory
        # leaves of the L1 cache, and blocks the loads of the other warpgroups from shared memory.
        words1 = load_words(entries, ok, 256, WORDS)
        mbarrier.wait(shared.empty[0].index(stage), (tile // 2 & 1) ^ 1)
        seen |= ok.to(gl.int32)
        shared.exponent.index(stage).store(exponent)
        shared.valid.index(stage).store(gl.where(ok, small_float(exponent), float("-inf")))
        shared.seen.store(seen)
        shared.entries.index(stage * 2).reinterpret(gl.int32, [N, 128], SMEM_W).store(to_half(words0, factor0))
        fence_async_shared()
        mbarrier.arrive(shared.full[0].index(stage), count=1)
        rope = load_rope(entries, ok, C.LAYOUT.rope_offset, WORDS)
        mbarrier.wait(shared.empty[1].index(stage), (tile // 2 & 1) ^ 1)
        shared.entries.index(stage * 2 + 1).reinterpret(gl.int32, [N, 128], SMEM_W).store(to_half(words1, factor1))
        shared.rope.index(stage).reinterpret(gl.int32, [N, 32], SMEM_W).store(scale_rope(rope, exponent, WORDS))
        fence_async_shared()
        mbarrier.arrive(shared.full[1].index(stage), count=1)
        entries, scales, ok = entry_pointers(main, extra, main_tiles, tile + 1, slot, C)
        scales0 = load_scales(scales, ok, 0, WORDS)
        scales1 = load_scales(scales, ok, 8, WORDS)
        words0 = load_words(entries, ok, 0, WORDS)
        slot = load_slots(main, extra, main_tiles, tile + 2, ROWS)


@gluon.jit
def copy_blocks(entries, ok, smem, OFFSET: gl.constexpr, BLOCKS: gl.constexpr):
    """64 bytes of each entry a block on their way to `smem` [BLOCKS, 64, 16] i32, zeros where there is no key."""
    COPY: gl.constexpr = gl.BlockedLayout([BLOCKS, 1, 4], [1, 8, 4], [1, 4, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPY))
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, COPY)))
    ptrs = gl.expand_dims(gl.convert_layout(entries, ROWS, assert_trivial=True), 0) + OFFSET
    ptrs = gl.expand_dims(ptrs + gl.expand_dims(block, 1) * 64, 2).to(gl.pointer_type(gl.int32), bitcast=True)
    mask = gl.expand_dims(gl.expand_dims(gl.convert_layout(ok, ROWS, assert_trivial=True), 0), 2)
    ptrs += gl.expand_dims(gl.expand_dims(word, 0), 0)
    mask, ptrs = gl.broadcast(mask, ptrs)
    # Entries start on 16 bytes, as the plan demands; of two sources the compiler does not see it.
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16, 16]), [1, 1, 4])
    ALL: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0])
    async_copy.async_load(smem.reinterpret(gl.int32, [BLOCKS, 64, 16], ALL), ptrs, mask=mask)
    async_copy.commit_group()


@gluon.jit
def load_row(entries, ok, OFFSET: gl.constexpr, LENGTH: gl.constexpr, LAYOUT: gl.constexpr):
    """LENGTH words of each entry from byte OFFSET on, [64, LENGTH] i32."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    ptrs = gl.convert_layout(entries, ROWS, assert_trivial=True) + OFFSET
    ptrs = gl.expand_dims(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), 1)
    ptrs += gl.expand_dims(gl.arange(0, LENGTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16]), [1, 4])  # as in `copy_blocks`
    return gl.load(ptrs, mask=gl.expand_dims(gl.convert_layout(ok, ROWS, assert_trivial=True), 1), other=0)


@gluon.jit
def load_scale_bytes(scales, ok):
    """The 8 bytes [64] i64 of each entry's UE8M0 scales."""
    return gl.load(scales.to(gl.pointer_type(gl.int64), bitcast=True), mask=ok, other=0)


@gluon.jit
def scale_byte(scales, BLOCK: gl.constexpr):
    """The biased exponent [64] i32 of a block's scales; 255 is NaN, and 0 is taken for 0."""
    word = scales.to(gl.int32) if BLOCK < 4 else (scales >> 32).to(gl.int32)
    return (word >> BLOCK % 4 * 8) & 255


@gluon.jit
def largest_of(pairs):
    """The largest magnitude in each row of bf16 pairs, as the bits of a float32: NaN is larger than numbers."""
    return gl.max(gl.maximum(pairs & 0x7FFF0000, (pairs & 0x7FFF) << 16), 1)


@gluon.jit
def scale_block(words, scales, exponent, BLOCK: gl.constexpr, PAIRS: gl.constexpr):
    """e4m3 words [64, 16] of a block times its scale over 2**exponent in float16: pairs [64, 32] i32."""
    factor = (gl.maximum(scale_byte(scales, BLOCK) - exponent, 0) << 23).to(gl.float32, bitcast=True)
    twice = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [factor], dtype=gl.int32, is_pure=True, pack=1
    )
    low, high = scale_words(words, gl.expand_dims(twice, 1))
    return gl.convert_layout(gl.reshape(gl.join(low, high), (64, 32)), PAIRS, assert_trivial=True)


@gluon.jit
def scale_halves(words, factor):
    """bf16 pairs [N, M] i32 times `factor` [N] f32 in float16."""
    factor, words = gl.broadcast(gl.expand_dims(factor, 1), words)
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y;
        shl.b32 x, $1, 16;
        and.b32 y, $1, 0xFFFF0000;
        mul.f32 x, x, $2;
        mul.f32 y, y, $2;
        cvt.rn.f16x2.f32 $0, y, x;
        }
        """,
        "=r,r,r", [words, factor], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def produce_v4(main, extra, main_tiles, tiles, shared, C: gl.constexpr):
    N: gl.constexpr = 64
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])  # 64 bytes a row, of the cache
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])  # 64 dims of it in float16
    ROWS: gl.constexpr = gl.SliceLayout(1, BLOCK)
    ROPES: gl.constexpr = gl.SliceLayout(1, PAIRS)
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)

    # Blocks of 64 dims share a scale. Raw bytes of the first six come through shared memory, a thread reading what it
    # has copied; the seventh and the roped dims through registers.
    slot = load_slots(main, extra, main_tiles, 0, ROWS)
    entries, scales, ok = entry_pointers(main, extra, main_tiles, 0, slot, C)
    copy_blocks(entries, ok, shared.rope[0], 0, 4)
    copy_blocks(entries, ok, shared.rope[1], 256, 2)
    scale_bytes = load_scale_bytes(scales, ok)
    rope = load_row(entries, ok, C.LAYOUT.rope_offset, 32, PAIRS)
    slot = load_slots(main, extra, main_tiles, 1, ROWS)
    seen = gl.zeros([N], gl.int32, ROWS)
    for tile in range(0, tiles):
        stage = tile % 2
        last = load_row(entries, ok, 384, 16, BLOCK)
        most = scale_byte(scale_bytes, 0)
        for block in gl.static_range(1, 7):
            most = gl.maximum(most, scale_byte(scale_bytes, block))
        # e4m3 passes its scale by up to 2**8, roped dims do not have one.
        rope_exponent = gl.convert_layout((largest_of(rope) >> 23) - 127 - 8, ROWS, assert_trivial=True)
        exponent = gl.minimum(gl.maximum(gl.maximum(most - 127, rope_exponent), -126), 126)
        mbarrier.wait(shared.empty[0].index(stage), (tile // 2 & 1) ^ 1)
        seen |= ok.to(gl.int32)
        shared.exponent.index(stage).store(exponent)
        valid = gl.where(most == 255, float("nan"), small_float(exponent))  # one NaN makes the whole score NaN
        shared.valid.index(stage).store(gl.where(ok, valid, float("-inf")))
        shared.seen.store(seen)
        async_copy.wait_group(1)
        left = shared.entries.index(stage * 2).reinterpret(gl.int32, [N, 128], SMEM_W)
        for block in gl.static_range(0, 4):
            words = shared.rope[0].index(block).load(BLOCK)
            left.slice(block * 32, 32, 1).store(scale_block(words, scale_bytes, exponent, block, PAIRS))
        fence_async_shared()
        mbarrier.arrive(shared.full[0].index(stage), count=1)
        entries, scales, ok = entry_pointers(main, extra, main_tiles, tile + 1, slot, C)
        copy_blocks(entries, ok, shared.rope[0], 0, 4)
        mbarrier.wait(shared.empty[1].index(stage), (tile // 2 & 1) ^ 1)
        async_copy.wait_group(1)
        right = shared.entries.index(stage * 2 + 1).reinterpret(gl.int32, [N, 128], SMEM_W)
        right.slice(64, 32, 1).store(scale_block(last, scale_bytes, exponent, 6, PAIRS))
        factor = gl.convert_layout(power_of_two(-exponent), ROPES, assert_trivial=True)
        right.slice(96, 32, 1).store(scale_halves(rope, factor))
        next_scales = load_scale_bytes(scales, ok)
        rope = load_row(entries, ok, C.LAYOUT.rope_offset, 32, PAIRS)
        slot = load_slots(main, extra, main_tiles, tile + 2, ROWS)
        for block in gl.static_range(0, 2):
            words = shared.rope[1].index(block).load(BLOCK)
            right.slice(block * 32, 32, 1).store(scale_block(words, scale_bytes, exponent, block + 4, PAIRS))
        fence_async_shared()
        mbarrier.arrive(shared.full[1].index(stage), count=1)
        copy_blocks(entries, ok, shared.rope[1], 256, 2)
        scale_bytes = next_scales
    async_copy.wait_group(0)


@gluon.jit
def store_queries(shared, PART: gl.constexpr, task, C: gl.constexpr):
    """32 queries into shared memory, each row divided by a power of two; the factors of its scores beside them."""
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    offs_h = task.head_block * 64 + PART * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, QUERIES))
    q_rows = task.q_row + offset_of(offs_h, C.Q_STRIDE_H, C.HEADS)
    rows = gl.expand_dims(q_rows.to(gl.pointer_type(gl.int32), bitcast=True), 1)
    rows += gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, QUERIES)), 0)
    head_ok = gl.expand_dims(offs_h < C.HEADS, 1)
    q0 = gl.load(rows, mask=head_ok, other=0)
    q1 = gl.load(rows + 128, mask=head_ok, other=0)
    largest = gl.maximum(largest_of(q0), largest_of(q1))
    if C.LAYOUT.tail:
        roped = gl.expand_dims(q_rows + 512, 1)
        roped += gl.expand_dims(gl.arange(0, C.LAYOUT.tail, layout=gl.SliceLayout(0, QUERIES)), 0)
        q2 = gl.load(roped, mask=head_ok, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, gl.max(finite_abs(q2), 1).to(gl.int32, bitcast=True))
    exponent = exponent_of(largest.to(gl.float32, bitcast=True))
    divisor = power_of_two(-exponent)
    left = shared.q.index(0).reinterpret(gl.int32, [64, 128], SMEM_W)
    right = shared.q.index(1).reinterpret(gl.int32, [64, 128], SMEM_W)
    left.slice(PART * 32, 32, 0).store(scale_halves(q0, divisor))
    right.slice(PART * 32, 32, 0).store(scale_halves(q1, divisor))
    if C.LAYOUT.tail:
        shared.q_rope.slice(PART * 32, 32, 0).store((q2 * gl.expand_dims(divisor, 1)).to(gl.bfloat16))
    shared.factor.slice(PART * 32, 32, 0).store(power_of_two(exponent) * (C.SCALE * LOG2E))
    fence_async_shared()


@gluon.jit
def start_scores(shared, tile, empty_scores, LAYOUT: gl.constexpr):
    stage = tile % 2
    zero = hidden_zero(tile)
    left = shared.entries.index(stage * 2).permute((1, 0))
    right = shared.entries.index(stage * 2 + 1).permute((1, 0))
    mbarrier.wait(shared.full[0].index(stage), tile // 2 & 1)
    s = warpgroup_mma(shared.q.index(zero), left, empty_scores, use_acc=False, is_async=True)
    mbarrier.wait(shared.full[1].index(stage), tile // 2 & 1)
    s = warpgroup_mma(shared.q.index(zero + 1), right, s, is_async=True)
    if LAYOUT.tail:
        s = warpgroup_mma(shared.q_rope, shared.rope.index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.constexpr_function
def holds_back(LAYOUT):
    """Whether a right P·V waits for S of the next tile: nobody else needs the tensor cores under its softmax.

    V4's producer is fast enough to be waiting for this half.
    """
    return LAYOUT.tail > 0


@gluon.jit
def weigh(s, out, scale, maximum, denominator, tile, shared, HOLD_BACK: gl.constexpr):
    """Softmax of a tile's scores: P and the factor that sums so far change by go to shared memory."""
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.tensor_type.layout)
    scores = warpgroup_mma_wait(0, deps=[s])
    if HOLD_BACK:
        mbarrier.arrive(shared.s_done, count=1, pred=tile > 0)
    else:
        gl.barrier()  # warps that start the softmax together: 1 % over V4's pages (H200, 2026-11-21)
    exponent = shared.exponent.index(tile % 2).load(KEYS)
    valid = shared.valid.index(tile % 2).load(KEYS)
    scores = scores * gl.expand_dims(power_of_two(exponent), 0)
    scores = scores * gl.expand_dims(scale, 1) + gl.expand_dims(valid, 0)
    new_maximum = gl.maximum(maximum, gl.max(scores, 1))
    # Without a valid key so far the maximum is −inf; −inf − −inf would be NaN.
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(scores - gl.expand_dims(base, 1))
    rescale = gl.exp2(maximum - base)
    shares = sum_in_threads(p * gl.expand_dims(power_of_two(-exponent), 0))
    denominator = scaled(denominator, rescale) + shares
    p = p.to(gl.float16)
    mbarrier.wait(shared.p_empty, (tile & 1) ^ 1)
    shared.factor.store(rescale)
    shared.p.store(p)
    fence_async_shared()
    mbarrier.arrive(shared.p_full, count=1)
    return scaled(out, rescale), new_maximum, denominator


@gluon.jit
def attend_left(tiles, shared, task, C: gl.constexpr):
    H: gl.constexpr = 64
    N: gl.constexpr = 64
    HEADS_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    HEADS_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    KEYS_S: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    HOLD_BACK: gl.constexpr = holds_back(C.LAYOUT)

    store_queries(shared, 0, task, C)
    mbarrier.arrive(shared.q_full, count=1)
    mbarrier.wait(shared.q_full, 0)
    scale = shared.factor.load(HEADS_S)

    maximum = gl.full([H], float("-inf"), gl.float32, HEADS_S)
    denominator = sum_in_threads(gl.zeros([H, N], gl.float32, S_LAYOUT))
    out = gl.zeros([H, 256], gl.float32, O_LAYOUT)
    empty_scores = gl.zeros([H, N], gl.float32, S_LAYOUT)
    s = start_scores(shared, 0, empty_scores, C.LAYOUT)
    for tile in range(0, tiles - 1):
        out, maximum, denominator = weigh(s, out, scale, maximum, denominator, tile, shared, HOLD_BACK)
        running = warpgroup_mma(shared.p, shared.entries.index(tile % 2 * 2), out, is_async=True)
        s = start_scores(shared, tile + 1, empty_scores, C.LAYOUT)
        out = warpgroup_mma_wait(3 if C.LAYOUT.tail else 2, deps=[running])
        mbarrier.arrive(shared.empty[0].index(tile % 2), count=1)
    tile = tiles - 1
    out, maximum, denominator = weigh(s, out, scale, maximum, denominator, tile, shared, HOLD_BACK)
    running = warpgroup_mma(shared.p, shared.entries.index(tile % 2 * 2), out, is_async=True)

    denominator = gl.convert_layout(gl.sum(denominator, 1), HEADS_S)
    rows = task.head_block * H + gl.arange(0, H, layout=HEADS_S)
    inverse, lse = close_sums(maximum, denominator, gl.max(shared.seen.load(KEYS_S), 0), rows, task, C)
    gl.store(task.lse_row + rows, lse, mask=rows < C.HEADS)
    mbarrier.wait(shared.p_empty, tile & 1)
    if HOLD_BACK:  # the last P·V waits for nothing
        mbarrier.arrive(shared.s_done, count=1)
    shared.factor.store(inverse)
    mbarrier.arrive(shared.p_full, count=1)
    out = warpgroup_mma_wait(0, deps=[running])
    store_half(out, gl.convert_layout(inverse, HEADS_O), shared.entries.index(0), 0, task, C)


@gluon.jit
def attend_right(main, extra, main_tiles, tiles, shared, task, C: gl.constexpr):
    HOLD_BACK: gl.constexpr = holds_back(C.LAYOUT)
    AHEADS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))
    store_queries(shared, 1, task, C)
    mbarrier.arrive(shared.q_full, count=1)
    for tile in gl.static_range(1, AHEAD):
        ahead = load_slots(main, extra, main_tiles, tile, AHEADS)
        prefetch(main, extra, main_tiles, tile, ahead, C)
    ahead = load_slots(main, extra, main_tiles, AHEAD, AHEADS)
    HEADS_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    out = gl.zeros([64, 256], gl.float32, O_LAYOUT)
    for tile in range(0, tiles):
        stage = tile % 2
        mbarrier.wait(shared.p_full, tile & 1)
        p = shared.p.load(gl.DotOperandLayout(0, O_LAYOUT, 2))
        factor = shared.factor.load(HEADS_O)
        mbarrier.arrive(shared.p_empty, count=1)
        out = out * gl.expand_dims(factor, 1)
        if HOLD_BACK:
            mbarrier.wait(shared.s_done, tile & 1)
        mbarrier.wait(shared.full[1].index(stage), tile // 2 & 1)
        running = warpgroup_mma(p, shared.entries.index(stage * 2 + 1), out, is_async=True)
        if HOLD_BACK:
            prefetch(main, extra, main_tiles, tile + AHEAD, ahead, C)
            ahead = load_slots(main, extra, main_tiles, tile + AHEAD + 1, AHEADS)
        out = warpgroup_mma_wait(0, deps=[running])
        mbarrier.arrive(shared.empty[1].index(stage), count=1)
        if not HOLD_BACK:
            prefetch(main, extra, main_tiles, tile + AHEAD, ahead, C)
            ahead = load_slots(main, extra, main_tiles, tile + AHEAD + 1, AHEADS)
    mbarrier.wait(shared.p_full, tiles & 1)
    store_half(out, shared.factor.load(HEADS_O), shared.entries.index(1), 1, task, C)


@gluon.jit
def attend_packed(main, extra, main_tiles, tiles, task, C: gl.constexpr):
    """Attention of 64 heads of a token over V3.2's or V4's entries."""
    LAYOUT: gl.constexpr = C.LAYOUT
    H: gl.constexpr = 64
    N: gl.constexpr = 64
    SMEM_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SMEM_V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SMEM_R: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    q_smem = gl.allocate_shared_memory(gl.float16, [2, H, 256], SMEM_L)
    entries_smem = gl.allocate_shared_memory(gl.float16, [4, N, 256], SMEM_L)
    if LAYOUT.tail:
        q_rope_smem = gl.allocate_shared_memory(gl.bfloat16, [H, LAYOUT.tail], SMEM_L)
        rope_smem = gl.allocate_shared_memory(gl.bfloat16, [2, N, LAYOUT.tail], SMEM_L)
    else:
        q_rope_smem = q_smem
        raw_left_smem = gl.allocate_shared_memory(gl.int32, [4, N, 16], SMEM_R)
        rope_smem = raw_left_smem, gl.allocate_shared_memory(gl.int32, [2, N, 16], SMEM_R)
    shared = Shared(
        q=q_smem,
        q_rope=q_rope_smem,
        entries=entries_smem,
        rope=rope_smem,
        p=gl.allocate_shared_memory(gl.float16, [H, N], SMEM_L),
        exponent=gl.allocate_shared_memory(gl.int32, [2, N], SMEM_V),
        valid=gl.allocate_shared_memory(gl.float32, [2, N], SMEM_V),
        seen=gl.allocate_shared_memory(gl.int32, [N], SMEM_V),
        factor=gl.allocate_shared_memory(gl.float32, [H], SMEM_V),
        full=(mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2)),
        empty=(mbarrier.allocate_mbarrier(batch=2), mbarrier.allocate_mbarrier(batch=2)),
        s_done=mbarrier.allocate_mbarrier(),
        q_full=mbarrier.allocate_mbarrier(),
        p_full=mbarrier.allocate_mbarrier(),
        p_empty=mbarrier.allocate_mbarrier(),
    )
    for stage in gl.static_range(2):
        for half in gl.static_range(2):
            mbarrier.init(shared.full[half].index(stage), count=1)
            mbarrier.init(shared.empty[half].index(stage), count=1)
    mbarrier.init(shared.s_done, count=1)
    mbarrier.init(shared.q_full, count=2)
    mbarrier.init(shared.p_full, count=1)
    mbarrier.init(shared.p_empty, count=1)

    gl.warp_specialize(
        [
            (attend_left, (tiles, shared, task, C)),
            (attend_right, (main, extra, main_tiles, tiles, shared, task, C)),
            (produce if LAYOUT.tail else produce_v4, (main, extra, main_tiles, tiles, shared, C)),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )
