"""The warps that fill the stages of the kernel for sm_100: `gather` with rows, `gather_packed` with packed entries.

Packed entries of V3.2 and V4 become bfloat16 rows. Their bytes come through registers: over V3.2's entries shared
memory has no room for them. Half of a tile is loaded while the other is converted. A lane loads 16 bytes of an entry,
and stores twice 16. Of the eight lanes that store at once four have even chunks of an entry and four odd ones, by the
swizzle of 128 bytes, of the next: no two meet in a bank.
"""

from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from xmla.core.lang.gluon import async_copy, gl, gluon
from xmla.core.lang.launches import gluon_wait_for_earlier as wait_for_earlier
from xmla.core.lang.offsets import gluon_offset_of as offset_of
from xmla.core.ops.attention.sparse_mla.gluon_sm90.common import (
    HALF_DIMS,
    HALVES,
    ROPE_DIMS,
    STAGES,
    TILE_HEADS,
    TILE_KEYS,
    VALUE_DIMS,
    entry_pointers,
    load_slots,
)
from xmla.core.ops.attention.sparse_mla.gluon_sm90.plain import copy_columns

COPIES = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))  # 4 × 128 bytes a warp
BLOCK_DIMS = gl.constexpr(64)  # as many as the roped ones; a scale is of one or two blocks
BLOCKS = gl.constexpr(HALF_DIMS.value // BLOCK_DIMS.value)  # of half an entry
BLOCK_WORDS = gl.constexpr(BLOCK_DIMS.value // 4)  # of e4m3
BLOCK_PAIRS = gl.constexpr(BLOCK_DIMS.value // 2)  # of bfloat16

# Of words [TILE_KEYS, BLOCKS, BLOCK_WORDS]: four lanes have an entry, all of its blocks, and so its scales.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [32, 0, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[TILE_KEYS.value, BLOCKS.value, BLOCK_WORDS.value],
    )
)
# Of a block's pairs [TILE_KEYS, BLOCK_PAIRS] likewise.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [32, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[TILE_KEYS.value, BLOCK_PAIRS.value],
    )
)
OF_BLOCKS = gl.constexpr(gl.SliceLayout(2, WORDS.value))  # [TILE_KEYS, BLOCKS]
ROWS = gl.constexpr(gl.SliceLayout(1, OF_BLOCKS.value))  # [TILE_KEYS]
PAIR_ROWS = gl.constexpr(gl.SliceLayout(1, PAIRS.value))


@gluon.jit
def decode_ue8m0(byte):
    """float32 scales of UE8M0 bytes: 0 is 2**-127, below the normal numbers, and 255 is NaN."""
    exponent = byte.to(gl.int32)
    bits = gl.where(exponent == 0, 0x00400000, gl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def copy_queries(shared, task, C: gl.constexpr):
    offs_h = task.head_block * TILE_HEADS + gl.arange(0, TILE_HEADS, layout=COPIES)
    rows, head_ok = task.q_row + offset_of(offs_h, C.Q_STRIDE_H, C.HEADS), offs_h < C.HEADS
    for half in gl.static_range(HALVES):
        copy_columns(rows, head_ok, shared.q.index(half), half * HALF_DIMS)
    if C.LAYOUT.tail:
        copy_columns(rows, head_ok, shared.q_tail, VALUE_DIMS)


@gluon.jit
def gather(main, extra, main_tiles, tiles, shared, task, C: gl.constexpr):
    """Copy the queries and then the rows of each tile: the first to arrive tells of the queries too."""
    gl.static_assert(C.LAYOUT.row % 8 == 0 and C.LAYOUT.rope_offset % 8 == 0, "rows are copied by 16 bytes")
    wait_for_earlier(C.OVERLAP_LIMIT)
    copy_queries(shared, task, C)
    slot = load_slots(main, extra, main_tiles, 0, COPIES)
    for tile in range(0, tiles):
        stage = tile % STAGES
        entries, _, ok = entry_pointers(main, extra, main_tiles, tile, slot, C)
        slot = load_slots(main, extra, main_tiles, tile + 1, COPIES)
        mbarrier.wait(shared.empty.index(stage), (tile // STAGES & 1) ^ 1)
        for half in gl.static_range(HALVES):
            copy_columns(entries, ok, shared.entries.index(stage * HALVES + half), half * HALF_DIMS)
        if C.LAYOUT.tail:
            copy_columns(entries, ok, shared.tails.index(stage), C.LAYOUT.rope_offset)
        async_copy.mbarrier_arrive(shared.full.index(stage), increment_count=False)
        shared.valid.index(stage).store(gl.where(ok, 0.0, float("-inf")))
        mbarrier.arrive(shared.full.index(stage), count=1)


@gluon.jit
def load_codes(entries, ok, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The e4m3 of half an entry as words [TILE_KEYS, BLOCKS, BLOCK_WORDS] i32; zeros for a block that is not e4m3."""
    block = HALF * BLOCKS + gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, OF_BLOCKS))
    word = gl.arange(0, BLOCK_WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, WORDS)))
    ptrs = gl.expand_dims(entries, 1) + gl.expand_dims(block * BLOCK_DIMS, 0)
    ptrs = gl.expand_dims(ptrs.to(gl.pointer_type(gl.int32), bitcast=True), 2)
    ptrs += gl.expand_dims(gl.expand_dims(word, 0), 0)
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16, 16]), [1, 1, 4])  # the plan demands it of both sources
    wanted = gl.expand_dims(ok, 1) & gl.expand_dims(block < LAYOUT.latent // BLOCK_DIMS, 0)
    return gl.load(ptrs, mask=gl.expand_dims(wanted, 2), other=0)


@gluon.jit
def load_rope(entries, ok, LAYOUT: gl.constexpr):
    """The bf16 roped dims as pairs [TILE_KEYS, BLOCK_PAIRS] i32."""
    entries = gl.convert_layout(entries + LAYOUT.rope_offset, PAIR_ROWS, assert_trivial=True)
    ptrs = gl.expand_dims(entries.to(gl.pointer_type(gl.int32), bitcast=True), 1)
    ptrs += gl.expand_dims(gl.arange(0, BLOCK_PAIRS, layout=gl.SliceLayout(0, PAIRS)), 0)
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16]), [1, 4])
    return gl.load(ptrs, mask=gl.expand_dims(gl.convert_layout(ok, PAIR_ROWS, assert_trivial=True), 1), other=0)


@gluon.jit
def load_scales(scales, ok, LAYOUT: gl.constexpr):
    """An entry's scales: [TILE_KEYS, 4] f32, or 8 bytes [TILE_KEYS] i64."""
    if LAYOUT.scale == "float32":
        ptrs = gl.expand_dims(scales.to(gl.pointer_type(gl.float32), bitcast=True), 1)
        ptrs += gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, OF_BLOCKS)), 0)
        ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16]), [1, 4])
        return gl.load(ptrs, mask=gl.expand_dims(ok, 1), other=0.0)
    else:
        return gl.load(scales.to(gl.pointer_type(gl.int64), bitcast=True), mask=ok, other=0)


@gluon.jit
def scales_of_half(scales, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The scale of each block [TILE_KEYS, BLOCKS] f32 of half an entry."""
    if LAYOUT.scale == "float32":  # each is of two blocks
        left, right = gl.split(gl.permute(gl.reshape(scales, (TILE_KEYS, 2, 2)), (0, 2, 1)))
        half = right if HALF == 1 else left
        return gl.convert_layout(gl.reshape(gl.join(half, half), (TILE_KEYS, BLOCKS)), OF_BLOCKS, assert_trivial=True)
    else:
        word = gl.expand_dims((scales >> (32 * HALF)).to(gl.int32), 1)
        block = gl.expand_dims(gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, OF_BLOCKS)), 0)
        return decode_ue8m0((word >> (block * 8)) & 255)


@gluon.jit
def to_bfloat16(words, scales):
    """e4m3 words [TILE_KEYS, BLOCKS, BLOCK_WORDS] times `scales`: pairs [TILE_KEYS, BLOCKS, BLOCK_PAIRS] i32."""
    scales, words = gl.broadcast(gl.expand_dims(scales, 2), words)
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        .reg .b32 x, y;
        .reg .f32 c, d, e, f;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 x, a;
        cvt.rn.f16x2.e4m3x2 y, b;
        mov.b32 {a, b}, x;
        cvt.f32.f16 c, a;
        cvt.f32.f16 d, b;
        mov.b32 {a, b}, y;
        cvt.f32.f16 e, a;
        cvt.f32.f16 f, b;
        mul.f32 c, c, $3;
        mul.f32 d, d, $3;
        mul.f32 e, e, $3;
        mul.f32 f, f, $3;
        cvt.rn.bf16x2.f32 $0, d, c;
        cvt.rn.bf16x2.f32 $1, f, e;
        }
        """,
        "=r,=r,r,r", [words, scales], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(low, high), (TILE_KEYS, BLOCKS, BLOCK_PAIRS))


@gluon.jit
def store_half_of_stage(shared, stage, HALF: gl.constexpr, words, scales, rope, LAYOUT: gl.constexpr):
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    pairs = to_bfloat16(words, scales_of_half(scales, HALF, LAYOUT))
    if HALF == 1 and LAYOUT.rope_in_value:  # in place of the last block
        rope = gl.convert_layout(rope, gl.SliceLayout(1, pairs.type.layout), assert_trivial=True)
        block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, pairs.type.layout)))
        is_rope = gl.expand_dims(gl.expand_dims(block, 0), 2) == BLOCKS - 1
        pairs = gl.where(is_rope, gl.expand_dims(rope, 1), pairs)
    smem = shared.entries.index(stage * 2 + HALF).reinterpret(gl.int32, [TILE_KEYS, HALF_DIMS // 2], SMEM_W)
    smem.store(gl.reshape(pairs, (TILE_KEYS, HALF_DIMS // 2)))


@gluon.jit
def gather_packed(main, extra, main_tiles, tiles, shared, task, C: gl.constexpr):
    """Copy the queries, then store the entries of each tile as rows."""
    LAYOUT: gl.constexpr = C.LAYOUT
    gl.static_assert(LAYOUT.values == "e4m3", "sm_100's packed entries are e4m3")
    gl.static_assert(
        LAYOUT.rope == ROPE_DIMS and LAYOUT.rope_values == "bfloat16", "sm_100's packed entries have 64 bf16 roped dims"
    )
    if LAYOUT.scale == "float32":
        gl.static_assert(
            LAYOUT.tail > 0 and LAYOUT.tile == 2 * BLOCK_DIMS and not LAYOUT.interleaved,
            "float32 scales on sm_100 are of 128 dims each, in order",
        )
    else:
        gl.static_assert(
            LAYOUT.scale == "ue8m0" and LAYOUT.tile == BLOCK_DIMS and LAYOUT.footer == 8,
            "UE8M0 scales on sm_100 are of 64 dims each, 8 bytes of a footer",
        )
    gl.static_assert(
        LAYOUT.data % 16 == 0 and LAYOUT.rope_offset % 16 == 0, "sm_100's packed entries are read by 16 bytes"
    )
    gl.static_assert(LAYOUT.footer > 0 or LAYOUT.scale_offset % 16 == 0, "sm_100 reads four float32 scales at once")
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)

    wait_for_earlier(C.OVERLAP_LIMIT)
    copy_queries(shared, task, C)
    async_copy.commit_group()
    slot = load_slots(main, extra, main_tiles, 0, ROWS)
    entries, scale_ptrs, ok = entry_pointers(main, extra, main_tiles, 0, slot, C)
    scales = load_scales(scale_ptrs, ok, LAYOUT)
    left = load_codes(entries, ok, 0, LAYOUT)
    slot = load_slots(main, extra, main_tiles, 1, ROWS)
    async_copy.wait_group(0)
    for tile in range(0, tiles):
        stage = tile % STAGES
        right = load_codes(entries, ok, 1, LAYOUT)
        rope = load_rope(entries, ok, LAYOUT)
        mbarrier.wait(shared.empty.index(stage), (tile // STAGES & 1) ^ 1)
        shared.valid.index(stage).store(gl.where(ok, 0.0, float("-inf")))
        store_half_of_stage(shared, stage, 0, left, scales, rope, LAYOUT)
        entries, scale_ptrs, ok = entry_pointers(main, extra, main_tiles, tile + 1, slot, C)
        later_scales = load_scales(scale_ptrs, ok, LAYOUT)
        left = load_codes(entries, ok, 0, LAYOUT)
        slot = load_slots(main, extra, main_tiles, tile + 2, ROWS)
        store_half_of_stage(shared, stage, 1, right, scales, rope, LAYOUT)
        if LAYOUT.tail:
            shared.tails.index(stage).reinterpret(gl.int32, [TILE_KEYS, BLOCK_PAIRS], SMEM_W).store(rope)
        scales = later_scales
        fence_async_shared()
        mbarrier.arrive(shared.full.index(stage), count=1)
