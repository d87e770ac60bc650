"""Producer warpgroup over V4's entries: seven blocks of 64 e4m3, 64 bf16 roped dims, and UE8M0 scales in the footer.

Roped dims are values too, so a half of a stage has four blocks of 64 dims: 0 … 3, and 4 … 6 beside the roped dims. Raw
bytes of blocks 0 … 5 come by `cp.async`, and each thread converts the bytes that it has copied. The others come through
registers.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    HALF_DIMS,
    STAGES,
    TILE_KEYS,
    entry_pointers,
    load_slots,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.conversion import largest_of, scale_halves, scale_words, small_float

BLOCK_DIMS = gl.constexpr(64)  # that share a scale; as many as roped dims
LEFT_BLOCKS = gl.constexpr(HALF_DIMS.value // BLOCK_DIMS.value)
RAW_BLOCKS = gl.constexpr(6)  # that are copied as raw bytes
BLOCK_WORDS = gl.constexpr(BLOCK_DIMS.value // 4)  # of e4m3
BLOCK_PAIRS = gl.constexpr(BLOCK_DIMS.value // 2)  # of float16

# Of a block [TILE_KEYS, BLOCK_WORDS] of e4m3 and [TILE_KEYS, BLOCK_PAIRS] of 16-bit dims.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, WORDS.value))
PAIR_ROWS = gl.constexpr(gl.SliceLayout(1, PAIRS.value))


@gluon.jit
def copy_blocks(entries, ok, smem, FIRST: gl.constexpr):
    """Start copies of blocks FIRST … of each entry to `smem` [blocks, TILE_KEYS, BLOCK_WORDS], zeros if not `ok`."""
    BLOCKS: gl.constexpr = smem.shape[0]
    COPY: gl.constexpr = gl.BlockedLayout([BLOCKS, 1, 4], [1, 8, 4], [1, 4, 1], [2, 1, 0])
    COPY_ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPY))
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    word = gl.arange(0, BLOCK_WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, COPY)))
    ptrs = gl.expand_dims(gl.convert_layout(entries, COPY_ROWS, assert_trivial=True), 0) + FIRST * BLOCK_DIMS
    ptrs = gl.expand_dims(ptrs + gl.expand_dims(block, 1) * BLOCK_DIMS, 2).to(gl.pointer_type(gl.int32), bitcast=True)
    mask = gl.expand_dims(gl.expand_dims(gl.convert_layout(ok, COPY_ROWS, assert_trivial=True), 0), 2)
    ptrs += gl.expand_dims(gl.expand_dims(word, 0), 0)
    mask, ptrs = gl.broadcast(mask, ptrs)
    # The plan demands entries on 16 bytes, which the compiler cannot prove of two sources.
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16, 16]), [1, 1, 4])
    ALL: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0])
    async_copy.async_load(smem.reinterpret(gl.int32, [BLOCKS, TILE_KEYS, BLOCK_WORDS], ALL), ptrs, mask=mask)
    async_copy.commit_group()


@gluon.jit
def load_row(entries, ok, OFFSET: gl.constexpr, LENGTH: gl.constexpr, REGISTERS: gl.constexpr):
    """LENGTH words of each entry from byte OFFSET on, [TILE_KEYS, LENGTH] i32."""
    LOAD_ROWS: gl.constexpr = gl.SliceLayout(1, REGISTERS)
    ptrs = gl.convert_layout(entries, LOAD_ROWS, assert_trivial=True) + OFFSET
    ptrs = gl.expand_dims(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), 1)
    ptrs += gl.expand_dims(gl.arange(0, LENGTH, layout=gl.SliceLayout(0, REGISTERS)), 0)
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16]), [1, 4])  # as in `copy_blocks`
    return gl.load(ptrs, mask=gl.expand_dims(gl.convert_layout(ok, LOAD_ROWS, assert_trivial=True), 1), other=0)


@gluon.jit
def load_scale_bytes(scales, ok):
    """Each entry's UE8M0 scales, 8 bytes [TILE_KEYS] i64."""
    return gl.load(scales.to(gl.pointer_type(gl.int64), bitcast=True), mask=ok, other=0)


@gluon.jit
def scale_byte(scales, BLOCK: gl.constexpr):
    """The biased exponent [TILE_KEYS] i32 of a block's scale. 255 is NaN; 0 is taken for 0, not for 2**-127."""
    word = scales.to(gl.int32) if BLOCK < 4 else (scales >> 32).to(gl.int32)
    return (word >> BLOCK % 4 * 8) & 255


@gluon.jit
def scale_block(words, scales, exponent, BLOCK: gl.constexpr):
    """e4m3 words [TILE_KEYS, BLOCK_WORDS] times scale / 2**exponent: float16 pairs [TILE_KEYS, BLOCK_PAIRS] i32."""
    factor = (gl.maximum(scale_byte(scales, BLOCK) - exponent, 0) << 23).to(gl.float32, bitcast=True)
    twice = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [factor], dtype=gl.int32, is_pure=True, pack=1
    )
    low, high = scale_words(words, gl.expand_dims(twice, 1))
    return gl.convert_layout(gl.reshape(gl.join(low, high), (TILE_KEYS, BLOCK_PAIRS)), PAIRS, assert_trivial=True)


@gluon.jit
def produce_v4(main, extra, main_tiles, tiles, shared, C: gl.constexpr):
    LAYOUT: gl.constexpr = C.LAYOUT
    BLOCKS: gl.constexpr = LAYOUT.scales
    LAST: gl.constexpr = BLOCKS - 1
    LAST_PAIR: gl.constexpr = (LAST - LEFT_BLOCKS) * BLOCK_PAIRS  # the last block's first pair in the right half
    gl.static_assert(LAYOUT.values == "e4m3", "V4's producer converts e4m3")
    gl.static_assert(LAYOUT.tile == BLOCK_DIMS and LAST == RAW_BLOCKS, "V4's producer converts seven blocks of 64 dims")
    gl.static_assert(
        LAYOUT.scale == "ue8m0" and LAYOUT.footer == 8, "V4's producer loads 8 bytes of UE8M0 scales at once"
    )
    gl.static_assert(LAYOUT.data % 16 == 0 and LAYOUT.rope_offset % 16 == 0, "V4's producer copies 16 bytes at once")
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)

    wait_for_earlier(C.OVERLAP_LIMIT)
    slot = load_slots(main, extra, main_tiles, 0, ROWS)
    entries, scales, ok = entry_pointers(main, extra, main_tiles, 0, slot, C)
    copy_blocks(entries, ok, shared.raw[0], 0)
    copy_blocks(entries, ok, shared.raw[1], LEFT_BLOCKS)
    scale_bytes = load_scale_bytes(scales, ok)
    rope = load_row(entries, ok, LAYOUT.rope_offset, BLOCK_PAIRS, PAIRS)
    slot = load_slots(main, extra, main_tiles, 1, ROWS)
    seen = gl.zeros([TILE_KEYS], gl.int32, ROWS)
    for tile in range(0, tiles):
        stage = tile % STAGES
        last = load_row(entries, ok, LAST * BLOCK_DIMS, BLOCK_WORDS, WORDS)
        most = scale_byte(scale_bytes, 0)
        for block in gl.static_range(1, BLOCKS):
            most = gl.maximum(most, scale_byte(scale_bytes, block))
        # An e4m3 value is up to 1.75 · 2**8 times its scale; a roped dim has no scale.
        rope_exponent = gl.convert_layout((largest_of(rope) >> 23) - 127 - 8, ROWS, assert_trivial=True)
        exponent = gl.minimum(gl.maximum(gl.maximum(most - 127, rope_exponent), -126), 126)
        mbarrier.wait(shared.empty[0].index(stage), (tile // STAGES & 1) ^ 1)
        seen |= ok.to(gl.int32)
        shared.exponent.index(stage).store(exponent)
        valid = gl.where(most == 255, float("nan"), small_float(exponent))  # one NaN makes the whole score NaN
        shared.valid.index(stage).store(gl.where(ok, valid, float("-inf")))
        shared.seen.store(seen)
        async_copy.wait_group(1)
        left = shared.entries.index(stage * 2).reinterpret(gl.int32, [TILE_KEYS, HALF_DIMS // 2], SMEM_W)
        for block in gl.static_range(0, LEFT_BLOCKS):
            words = shared.raw[0].index(block).load(WORDS)
            left.slice(block * BLOCK_PAIRS, BLOCK_PAIRS, 1).store(scale_block(words, scale_bytes, exponent, block))
        fence_async_shared()
        mbarrier.arrive(shared.full[0].index(stage), count=1)
        entries, scales, ok = entry_pointers(main, extra, main_tiles, tile + 1, slot, C)
        copy_blocks(entries, ok, shared.raw[0], 0)
        mbarrier.wait(shared.empty[1].index(stage), (tile // STAGES & 1) ^ 1)
        async_copy.wait_group(1)
        right = shared.entries.index(stage * 2 + 1).reinterpret(gl.int32, [TILE_KEYS, HALF_DIMS // 2], SMEM_W)
        right.slice(LAST_PAIR, BLOCK_PAIRS, 1).store(scale_block(last, scale_bytes, exponent, LAST))
        factor = gl.convert_layout(power_of_two(-exponent), PAIR_ROWS, assert_trivial=True)
        right.slice(LAST_PAIR + BLOCK_PAIRS, BLOCK_PAIRS, 1).store(scale_halves(rope, factor))
        next_scales = load_scale_bytes(scales, ok)
        rope = load_row(entries, ok, LAYOUT.rope_offset, BLOCK_PAIRS, PAIRS)
        slot = load_slots(main, extra, main_tiles, tile + 2, ROWS)
        for block in gl.static_range(0, RAW_BLOCKS - LEFT_BLOCKS):
            words = shared.raw[1].index(block).load(WORDS)
            block_smem = right.slice(block * BLOCK_PAIRS, BLOCK_PAIRS, 1)
            block_smem.store(scale_block(words, scale_bytes, exponent, LEFT_BLOCKS + block))
        fence_async_shared()
        mbarrier.arrive(shared.full[1].index(stage), count=1)
        copy_blocks(entries, ok, shared.raw[1], LEFT_BLOCKS)
        scale_bytes = next_scales
    async_copy.wait_group(0)
