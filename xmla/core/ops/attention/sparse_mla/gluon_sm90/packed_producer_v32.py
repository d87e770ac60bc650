"""Producer warpgroup over V3.2's entries: 512 e4m3, a float32 scale for 128 of them, 64 bf16 roped dims.

It gathers entries into registers, converts e4m3 to float16 and stores the halves of a stage.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from xmla.core.lang.gluon import gl, gluon
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.numbers import gluon_power_of_two as power_of_two
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    HALF_DIMS,
    ROPE_DIMS,
    STAGES,
    TILE_KEYS,
    entry_pointers,
    load_slots,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.conversion import exponent_of, finite_abs, scale_words, small_float

# Of words [TILE_KEYS, tile of 128 dims, block of 64, word]. Eight lanes of two rows store 16 bytes each without a bank
# conflict: even chunks of one row, odd chunks of the other.
WORDS = gl.constexpr(gl.BlockedLayout([1, 2, 2, 4], [8, 1, 1, 4], [4, 1, 1, 1], [3, 2, 1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS.value))))
ROPES = gl.constexpr(gl.SliceLayout(1, WORDS.value))  # of words [TILE_KEYS, block of 32 dims, word]
ROPE_ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, ROPES.value)))
TILES = gl.constexpr(2)  # of 128 dims in a half


@gluon.jit
def load_words(entries, ok, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The e4m3 of a half of each entry as words [TILE_KEYS, TILES, 2, 16] i32."""
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    block = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, WORDS))))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, WORDS))))
    BLOCK: gl.constexpr = LAYOUT.tile // 2
    ptrs = gl.expand_dims(entries, 1) + HALF * HALF_DIMS + gl.expand_dims(tile, 0) * LAYOUT.tile  # [TILE_KEYS, TILES]
    ptrs = gl.expand_dims(ptrs, 2) + gl.expand_dims(gl.expand_dims(block, 0), 0) * BLOCK  # [TILE_KEYS, TILES, 2]
    ptrs = gl.expand_dims(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), 3)
    ptrs += gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 0), 0)
    mask = gl.expand_dims(gl.expand_dims(gl.expand_dims(ok, 1), 2), 3)
    return gl.load(ptrs, mask=mask, other=0)


@gluon.jit
def load_rope(entries, ok, LAYOUT: gl.constexpr):
    """The bf16 roped dims of each entry as words [TILE_KEYS, 2, 16] i32."""
    block = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROPES)))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, ROPES)))
    entries = gl.convert_layout(entries, ROPE_ROWS, assert_trivial=True)
    ok = gl.convert_layout(ok, ROPE_ROWS, assert_trivial=True)
    BLOCK: gl.constexpr = 2 * (ROPE_DIMS // 2)  # bytes of half of the bf16 dims
    ptrs = gl.expand_dims(entries, 1) + LAYOUT.rope_offset + gl.expand_dims(block, 0) * BLOCK
    ptrs = gl.expand_dims(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), 2)
    ptrs += gl.expand_dims(gl.expand_dims(word, 0), 0)
    return gl.load(ptrs, mask=gl.expand_dims(gl.expand_dims(ok, 1), 2), other=0)


@gluon.jit
def load_scales(scales, ok, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of a half of each entry, [TILE_KEYS, TILES] f32."""
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    FIRST: gl.constexpr = HALF * TILES * LAYOUT.scale_bytes
    ptrs = gl.expand_dims((scales + FIRST).to(gl.pointer_type(gl.float32), bitcast=True), 1)
    return gl.load(ptrs + gl.expand_dims(tile, 0), mask=gl.expand_dims(ok, 1), other=0.0)


@gluon.jit
def scale_pairs(scales, exponent):
    """scales [TILE_KEYS, TILES] / 2**exponent in float16, twice in an i32."""
    ratio = scales * gl.expand_dims(power_of_two(-exponent), 1)
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [ratio], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def to_half(words, twice):
    """e4m3 words [TILE_KEYS, TILES, 2, 16] times scale pairs [TILE_KEYS, TILES]: float16 pairs [TILE_KEYS, 128] i32."""
    low, high = scale_words(words, gl.expand_dims(gl.expand_dims(twice, 2), 3))
    return gl.reshape(gl.join(low, high), (TILE_KEYS, HALF_DIMS // 2))


@gluon.jit
def scale_rope(words, exponent):
    """bf16 words [TILE_KEYS, 2, 16] divided by 2**exponent: pairs [TILE_KEYS, 32] i32."""
    # The bf16 of 2**-exponent, twice in an i32.
    factor = gl.convert_layout((127 - exponent) * 0x800080, ROPE_ROWS, assert_trivial=True)
    factor, words = gl.broadcast(gl.expand_dims(gl.expand_dims(factor, 1), 2), words)
    scaled = gl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $2;", "=r,r,r", [words, factor], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.reshape(scaled, (TILE_KEYS, ROPE_DIMS // 2))


@gluon.jit
def produce_v32(main, extra, main_tiles, tiles, shared, C: gl.constexpr):
    LAYOUT: gl.constexpr = C.LAYOUT
    gl.static_assert(LAYOUT.values == "e4m3", "V3.2's producer converts e4m3")
    gl.static_assert(LAYOUT.tile * TILES == HALF_DIMS, "V3.2's producer has registers for two scales of a half")
    gl.static_assert(
        LAYOUT.scale == "float32" and not LAYOUT.interleaved, "V3.2's producer reads float32 scales in order"
    )
    gl.static_assert(LAYOUT.data % 4 == 0 and LAYOUT.rope_offset % 4 == 0, "V3.2's producer reads entries by words")
    gl.static_assert(
        LAYOUT.footer > 0 or LAYOUT.scale_offset % 4 == 0, "V3.2's producer reads scales on multiples of 4 bytes"
    )
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    PAIRS: gl.constexpr = [TILE_KEYS, HALF_DIMS // 2]
    ROPE_PAIRS: gl.constexpr = [TILE_KEYS, ROPE_DIMS // 2]

    wait_for_earlier(C.OVERLAP_LIMIT)
    slot = load_slots(main, extra, main_tiles, 0, ROWS)
    entries, scales, ok = entry_pointers(main, extra, main_tiles, 0, slot, C)
    scales0 = load_scales(scales, ok, 0, LAYOUT)
    scales1 = load_scales(scales, ok, 1, LAYOUT)
    words0 = load_words(entries, ok, 0, LAYOUT)
    slot = load_slots(main, extra, main_tiles, 1, ROWS)
    seen = gl.zeros([TILE_KEYS], gl.int32, ROWS)
    for tile in range(0, tiles):
        stage = tile % STAGES
        exponent = gl.maximum(gl.max(finite_abs(scales0), 1), gl.max(finite_abs(scales1), 1))
        exponent = exponent_of(exponent)  # [TILE_KEYS]
        factor0 = scale_pairs(scales0, exponent)
        factor1 = scale_pairs(scales1, exponent)
        # One part is loaded while another is converted. Loads of a whole tile do not fit what shared memory leaves of
        # the L1 cache, and block the other warpgroups' loads from shared memory.
        words1 = load_words(entries, ok, 1, LAYOUT)
        mbarrier.wait(shared.empty[0].index(stage), (tile // STAGES & 1) ^ 1)
        seen |= ok.to(gl.int32)
        shared.exponent.index(stage).store(exponent)
        shared.valid.index(stage).store(gl.where(ok, small_float(exponent), float("-inf")))
        shared.seen.store(seen)
        shared.entries.index(stage * 2).reinterpret(gl.int32, PAIRS, SMEM_W).store(to_half(words0, factor0))
        fence_async_shared()
        mbarrier.arrive(shared.full[0].index(stage), count=1)
        rope = load_rope(entries, ok, LAYOUT)
        mbarrier.wait(shared.empty[1].index(stage), (tile // STAGES & 1) ^ 1)
        shared.entries.index(stage * 2 + 1).reinterpret(gl.int32, PAIRS, SMEM_W).store(to_half(words1, factor1))
        shared.rope.index(stage).reinterpret(gl.int32, ROPE_PAIRS, SMEM_W).store(scale_rope(rope, exponent))
        fence_async_shared()
        mbarrier.arrive(shared.full[1].index(stage), count=1)
        entries, scales, ok = entry_pointers(main, extra, main_tiles, tile + 1, slot, C)
        scales0 = load_scales(scales, ok, 0, LAYOUT)
        scales1 = load_scales(scales, ok, 1, LAYOUT)
        words0 = load_words(entries, ok, 0, LAYOUT)
        slot = load_slots(main, extra, main_tiles, tile + 2, ROWS)
