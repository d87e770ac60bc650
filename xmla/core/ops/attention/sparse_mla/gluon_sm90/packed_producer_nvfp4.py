"""Producer warpgroup over NVFP4 entries: 512 e2m1, an e4m3 scale for 16 of them, 64 e4m3 roped dims.

As V3.2's it gathers entries into registers, a half while the other is converted. Every value times its scale is a
multiple of 2**-10 with six significant bits, so float16 holds all of them over 2**8: entries have that one power of
two, and none of their own. Conversions are integer operations, but for the scales and roped dims.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from xmla.core.lang.gluon import gl, gluon
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    HALF_DIMS,
    ROPE_DIMS,
    STAGES,
    TILE_KEYS,
    entry_pointers,
    load_slots,
)

EXPONENT = gl.constexpr(8)  # of every entry; `scale_pairs` multiplies by 2**6, `scale_rope` by 2**-8
BLOCKS = gl.constexpr(4)  # of 64 dims, in a half
BLOCK_WORDS = gl.constexpr(HALF_DIMS.value // BLOCKS.value // 8)  # of e2m1
GROUPS = gl.constexpr(4)  # of dims that share a scale, in a block; as many scales of one group follow each other

# Of words [TILE_KEYS, block, word]: a row's 16 bytes of a block are a thread's. Eight lanes, of four rows, store 16
# bytes each without a bank conflict.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4, 4], [16, 1, 2], [4, 1, 1], [2, 1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, WORDS.value)))
# The same words as [TILE_KEYS, block, group, 2].
GROUPED = gl.constexpr(gl.BlockedLayout([1, 4, 2, 2], [16, 1, 2, 1], [4, 1, 1, 1], [3, 2, 1, 0]))
SCALES = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, GROUPED.value)))  # of [TILE_KEYS, group]
SCALE_ROWS = gl.constexpr(gl.SliceLayout(1, SCALES.value))
ROPES = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))  # of words [TILE_KEYS, word]
ROPE_ROWS = gl.constexpr(gl.SliceLayout(1, ROPES.value))


@gluon.jit
def load_words(entries, ok, HALF: gl.constexpr):
    """The e2m1 of a half of each entry as words [TILE_KEYS, BLOCKS, BLOCK_WORDS] i32."""
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    word = gl.arange(0, BLOCK_WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, WORDS)))
    ptrs = gl.expand_dims(entries, 1) + HALF * (HALF_DIMS // 2) + gl.expand_dims(block, 0) * (BLOCK_WORDS * 4)
    ptrs = gl.expand_dims(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), 2)
    ptrs += gl.expand_dims(gl.expand_dims(word, 0), 0)
    # The plan demands entries on 16 bytes, which the compiler cannot prove of two sources.
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16, 16]), [1, 1, 4])
    return gl.load(ptrs, mask=gl.expand_dims(gl.expand_dims(ok, 1), 2), other=0)


@gluon.jit
def load_scales(scales, ok):
    """The scales of each entry [TILE_KEYS, GROUPS] i64: of group g those of every block, four bytes a half."""
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, SCALES))
    scales = gl.convert_layout(scales, SCALE_ROWS, assert_trivial=True)
    ok = gl.convert_layout(ok, SCALE_ROWS, assert_trivial=True)
    ptrs = gl.expand_dims(scales.to(gl.pointer_type(gl.int64), bitcast=True), 1) + gl.expand_dims(group, 0)
    return gl.load(ptrs, mask=gl.expand_dims(ok, 1), other=0)


@gluon.jit
def load_rope(entries, ok, LAYOUT: gl.constexpr):
    """The e4m3 roped dims of each entry as words [TILE_KEYS, 16] i32."""
    entries = gl.convert_layout(entries, ROPE_ROWS, assert_trivial=True) + LAYOUT.rope_offset
    ptrs = gl.expand_dims(entries.to(gl.pointer_type(gl.int32), bitcast=True), 1)
    ptrs += gl.expand_dims(gl.arange(0, ROPE_DIMS // 4, layout=gl.SliceLayout(0, ROPES)), 0)
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16]), [1, 4])  # as in `load_words`
    return gl.load(ptrs, mask=gl.expand_dims(gl.convert_layout(ok, ROPE_ROWS, assert_trivial=True), 1), other=0)


@gluon.jit
def scale_pairs(scales):
    """A half's scales [TILE_KEYS, GROUPS] i32 over 2**(EXPONENT − 14), in float16, twice: [TILE_KEYS, BLOCKS, GROUPS].

    What they multiply are values over 2**14.
    """
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, GROUPED))))
    byte = (gl.expand_dims(scales, 1) >> gl.expand_dims(gl.expand_dims(block, 0), 2) * 8) & 0xFF
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a;
        .reg .b32 x, y;
        cvt.u16.u32 a, $1;
        cvt.rn.f16x2.e4m3x2 x, a;
        mov.b32 y, 0x54005400;
        mul.f16x2 $0, x, y;
        }
        """,
        "=r,r", [byte * 0x101], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def conversion():
    """PTX of a word $4 of e2m1 times scale pair $5: float16 pairs $0 … $3, each of a byte.

    The four bits of a value become sign, and the last exponent and first mantissa bits, of a float16: it over 2**14.
    """
    lines = [".reg .b32 l, x, y;", "shl.b32 l, $4, 4;"]
    for byte, selector in enumerate(("0x4000", "0x5111", "0x6222", "0x7333")):  # x: of $4 on top, of l below
        lines += [f"prmt.b32 x, l, $4, {selector};", "shr.u32 y, x, 3;", "and.b32 x, x, 0x80008000;"]
        lines += ["and.b32 y, y, 0x0E000E00;", "or.b32 x, x, y;", f"mul.f16x2 ${byte}, x, $5;"]
    return "\n".join(["{", *lines, "}"])


@gluon.jit
def to_half(words, twice):
    """e2m1 words [TILE_KEYS, BLOCKS, BLOCK_WORDS] times scale pairs: float16 pairs [TILE_KEYS, HALF_DIMS / 2] i32."""
    words = gl.convert_layout(gl.reshape(words, (TILE_KEYS, BLOCKS, GROUPS, 2)), GROUPED, assert_trivial=True)
    twice, words = gl.broadcast(gl.expand_dims(twice, 3), words)
    pairs = gl.inline_asm_elementwise(
        conversion(), "=&r,=&r,=&r,=r,r,r", [words, twice], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(gl.join(pairs[0], pairs[2]), gl.join(pairs[1], pairs[3])), (TILE_KEYS, HALF_DIMS // 2))


@gluon.jit
def scale_rope(words):
    """e4m3 words [TILE_KEYS, 16] over 2**EXPONENT: bfloat16 pairs [TILE_KEYS, ROPE_DIMS / 2] i32."""
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        .reg .b32 x, y, z;
        .reg .f32 p, q;
        mov.b32 z, 0x1C001C00;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a;
        cvt.rn.f16x2.e4m3x2 y, b;
        mul.f16x2 x, x, z;
        mul.f16x2 y, y, z;
        mov.b32 {a, b}, x;
        cvt.f32.f16 p, a;
        cvt.f32.f16 q, b;
        cvt.rn.bf16x2.f32 $0, q, p;
        mov.b32 {a, b}, y;
        cvt.f32.f16 p, a;
        cvt.f32.f16 q, b;
        cvt.rn.bf16x2.f32 $1, q, p;
        }
        """,
        "=&r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(low, high), (TILE_KEYS, ROPE_DIMS // 2))


@gluon.jit
def produce_nvfp4(main, extra, main_tiles, tiles, shared, C: gl.constexpr):
    LAYOUT: gl.constexpr = C.LAYOUT
    gl.static_assert(LAYOUT.values == "e2m1" and LAYOUT.tile == 16, "NVFP4's producer converts e2m1, 16 of a scale")
    gl.static_assert(LAYOUT.scale == "e4m3" and LAYOUT.interleaved, "NVFP4's producer loads a group's scales at once")
    gl.static_assert(LAYOUT.data % 16 == 0 and LAYOUT.rope_offset % 16 == 0, "NVFP4's producer loads 16 bytes at once")
    gl.static_assert(LAYOUT.scale_offset % 8 == 0, "NVFP4's producer reads scales on multiples of 8 bytes")
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    PAIRS: gl.constexpr = [TILE_KEYS, HALF_DIMS // 2]
    ROPE_PAIRS: gl.constexpr = [TILE_KEYS, ROPE_DIMS // 2]

    wait_for_earlier(C.OVERLAP_LIMIT)
    slot = load_slots(main, extra, main_tiles, 0, ROWS)
    entries, scales, ok = entry_pointers(main, extra, main_tiles, 0, slot, C)
    scale_words = load_scales(scales, ok)
    words0 = load_words(entries, ok, 0)
    slot = load_slots(main, extra, main_tiles, 1, ROWS)
    seen = gl.zeros([TILE_KEYS], gl.int32, ROWS)
    exponent = gl.full([TILE_KEYS], EXPONENT, gl.int32, ROWS)
    for tile in range(0, tiles):
        stage = tile % STAGES
        twice0 = scale_pairs(scale_words.to(gl.int32))
        twice1 = scale_pairs((scale_words >> 32).to(gl.int32))
        words1 = load_words(entries, ok, 1)
        mbarrier.wait(shared.empty[0].index(stage), (tile // STAGES & 1) ^ 1)
        seen |= ok.to(gl.int32)
        shared.exponent.index(stage).store(exponent)
        shared.valid.index(stage).store(gl.where(ok, exponent.to(gl.float32), float("-inf")))
        shared.seen.store(seen)
        shared.entries.index(stage * 2).reinterpret(gl.int32, PAIRS, SMEM_W).store(to_half(words0, twice0))
        fence_async_shared()
        mbarrier.arrive(shared.full[0].index(stage), count=1)
        rope = load_rope(entries, ok, LAYOUT)
        mbarrier.wait(shared.empty[1].index(stage), (tile // STAGES & 1) ^ 1)
        shared.entries.index(stage * 2 + 1).reinterpret(gl.int32, PAIRS, SMEM_W).store(to_half(words1, twice1))
        shared.rope.index(stage).reinterpret(gl.int32, ROPE_PAIRS, SMEM_W).store(scale_rope(rope))
        fence_async_shared()
        mbarrier.arrive(shared.full[1].index(stage), count=1)
        entries, scales, ok = entry_pointers(main, extra, main_tiles, tile + 1, slot, C)
        scale_words = load_scales(scales, ok)
        words0 = load_words(entries, ok, 0)
        slot = load_slots(main, extra, main_tiles, tile + 2, ROWS)
