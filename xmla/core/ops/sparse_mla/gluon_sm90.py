"""Attention over V3.2 pages on Hopper, in Gluon.

One program: 64 heads of a token against its keys, 64 at a time, on three warpgroups that hand tiles to each other
through shared memory and mbarriers.
- `produce` gathers entries into registers, converts e4m3 to float16 and stores them in one of two stages.
- `attend_left` computes S = Q·Kᵀ and its softmax, hands P and the factor that earlier sums shrink by to the other, and
  has the left 256 columns of P·V.
- `attend_right` has the right 256 columns, and fetches entries into the L2 cache three tiles ahead.
The halves of a stage are handed over one by one: the left one is free as soon as its P·V is, while the right one's runs
under the next softmax, when nobody else needs the tensor cores.

Numbers: float16 holds e4m3 exactly. An entry comes divided by 2**e, the largest of its scales rounded down to a power
of two, and a row of Q by such a power too; scores get both back in float32. The values keep the divisor, so the
probabilities carry 2**e instead: they are 2**(score + e − maximum) with the maximum over score + e.

What the compiler makes of it decides: a register that spills inside a loop waits for every load in flight (they share
few scoreboards, and gathers leave nothing in the L1 cache), and so does a conversion on the slow unit. See
benchmarks/log/sparse_mla_decode.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from xmla.core.lang import LN2, LOG2E

AHEAD = gl.constexpr(3)  # tiles; 5 is slower
# A thread's registers in `attend_right` and `produce`; `attend_left` has the 216 that remain. With fewer than 176, or
# fewer than 112, loops spill.
RIGHT_REGISTERS = gl.constexpr(176)
PRODUCER_REGISTERS = gl.constexpr(112)


@gluon.jit
def exponent_of(x):
    """The largest integer e with 2**e ≤ |x|, from the bits of float32 `x`, within ±100."""
    bits = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return gl.minimum(gl.maximum((bits >> 23) - 127, -100), 100)


@gluon.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def small_float(x):
    """float32 of an integer within ±2**21, by arithmetic: results of the conversion unit wait for loads in flight."""
    return (x + 0x4B400000).to(gl.float32, bitcast=True) - 12582912.0


@gluon.jit
def finite_abs(x):
    return gl.where(x == x, gl.abs(x), 0.0)


@gluon.jit
def load_slots(slots_row, start, end, LAYOUT: gl.constexpr):
    """The slots of 64 entries, −1 past the end."""
    offs = start + gl.arange(0, 64, layout=LAYOUT)
    return gl.load(slots_row + offs, mask=offs < end, other=-1)


@gluon.jit
def entry_pointers(cache, slot, num_slots, PAGE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, ROW: gl.constexpr):
    """Where each of 64 entries starts, and which of them are valid."""
    ok = (slot >= 0) & (slot < num_slots)
    return cache + ((slot // PAGE_SIZE).to(gl.int64) * PAGE_STRIDE + (slot % PAGE_SIZE) * ROW), ok


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
def load_scales(entries, ok, OFFSET: gl.constexpr, WORDS: gl.constexpr):
    """Two scales of each entry, [64, 2] f32."""
    group = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, WORDS))))
    ptrs = gl.expand_dims((entries + OFFSET).to(gl.pointer_type(gl.float32), bitcast=True), 1)
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
    twice, words = gl.broadcast(gl.expand_dims(gl.expand_dims(twice, 2), 3), words)
    low, high = gl.inline_asm_elementwise(
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
    return gl.reshape(gl.join(low, high), (64, 128))


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
def prefetch(cache, slot, num_slots, PAGE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, ROW: gl.constexpr):
    """Entries on their way to the L2 cache, a line of 128 bytes at a time."""
    LINES: gl.constexpr = slot.type.layout.parent
    entries, ok = entry_pointers(cache, slot, num_slots, PAGE_STRIDE, PAGE_SIZE, ROW)
    line = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, LINES)), 0) * 128
    wanted = gl.expand_dims(ok.to(gl.int32), 1) & (line < ROW).to(gl.int32)
    ptrs, wanted = gl.broadcast(gl.expand_dims(entries, 1) + line, wanted)
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
def produce(cache, slots_row, num_slots, first, end, tiles, latent_smem, rope_smem, exponent_smem, valid_smem,
            seen_smem, full_left, full_right, empty_left, empty_right, PAGE_STRIDE: gl.constexpr,
            PAGE_SIZE: gl.constexpr, ROW: gl.constexpr, SCALE_OFFSET: gl.constexpr,
            ROPE_OFFSET: gl.constexpr):  # fmt: skip
    N: gl.constexpr = 64
    # Eight lanes of a row pair store 16 bytes each without a bank conflict: even chunks of one, odd ones of the other.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 2, 2, 4], [8, 1, 1, 4], [4, 1, 1, 1], [3, 2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORDS)))
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)

    entries, ok = entry_pointers(cache, load_slots(slots_row, first, end, ROWS), num_slots, PAGE_STRIDE, PAGE_SIZE, ROW)
    scales0 = load_scales(entries, ok, SCALE_OFFSET, WORDS)
    scales1 = load_scales(entries, ok, SCALE_OFFSET + 8, WORDS)
    words0 = load_words(entries, ok, 0, WORDS)
    slot = load_slots(slots_row, first + N, end, ROWS)
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
        mbarrier.wait(empty_left.index(stage), (tile // 2 & 1) ^ 1)
        seen |= ok.to(gl.int32)
        exponent_smem.index(stage).store(exponent)
        valid_smem.index(stage).store(gl.where(ok, small_float(exponent), float("-inf")))
        seen_smem.store(seen)
        latent_smem.index(stage * 2)._reinterpret(gl.int32, [N, 128], SMEM_W).store(to_half(words0, factor0))
        fence_async_shared()
        mbarrier.arrive(full_left.index(stage), count=1)
        rope = load_rope(entries, ok, ROPE_OFFSET, WORDS)
        mbarrier.wait(empty_right.index(stage), (tile // 2 & 1) ^ 1)
        latent_smem.index(stage * 2 + 1)._reinterpret(gl.int32, [N, 128], SMEM_W).store(to_half(words1, factor1))
        rope_smem.index(stage)._reinterpret(gl.int32, [N, 32], SMEM_W).store(scale_rope(rope, exponent, WORDS))
        fence_async_shared()
        mbarrier.arrive(full_right.index(stage), count=1)
        entries, ok = entry_pointers(cache, slot, num_slots, PAGE_STRIDE, PAGE_SIZE, ROW)
        scales0 = load_scales(entries, ok, SCALE_OFFSET, WORDS)
        scales1 = load_scales(entries, ok, SCALE_OFFSET + 8, WORDS)
        words0 = load_words(entries, ok, 0, WORDS)
        slot = load_slots(slots_row, first + (tile + 2) * N, end, ROWS)


@gluon.jit
def store_queries(q_row, head_block, q_latent_smem, q_rope_smem, factor_smem, PART: gl.constexpr, HEADS: gl.constexpr,
                  Q_STRIDE_H: gl.constexpr, SCALE: gl.constexpr):  # fmt: skip
    """32 queries into shared memory, each row divided by a power of two; the factors of its scores beside them."""
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    offs_h = head_block * 64 + PART * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, QUERIES))
    rows = q_row + gl.expand_dims(offs_h, 1) * Q_STRIDE_H
    head_ok = gl.expand_dims(offs_h < HEADS, 1)
    offs_l = gl.arange(0, 256, layout=gl.SliceLayout(0, QUERIES))
    offs_e = gl.arange(0, 64, layout=gl.SliceLayout(0, QUERIES))
    q0 = gl.load(rows + gl.expand_dims(offs_l, 0), mask=head_ok, other=0.0)
    q1 = gl.load(rows + 256 + gl.expand_dims(offs_l, 0), mask=head_ok, other=0.0)
    q2 = gl.load(rows + 512 + gl.expand_dims(offs_e, 0), mask=head_ok, other=0.0)
    largest = gl.maximum(
        gl.max(finite_abs(q0.to(gl.float32)), 1),
        gl.maximum(gl.max(finite_abs(q1.to(gl.float32)), 1), gl.max(finite_abs(q2.to(gl.float32)), 1)),
    )
    exponent = exponent_of(largest)
    divisor = gl.expand_dims(power_of_two(-exponent), 1)
    q_latent_smem.index(0).slice(PART * 32, 32, 0).store((q0.to(gl.float32) * divisor).to(gl.float16))
    q_latent_smem.index(1).slice(PART * 32, 32, 0).store((q1.to(gl.float32) * divisor).to(gl.float16))
    q_rope_smem.slice(PART * 32, 32, 0).store((q2.to(gl.float32) * divisor).to(gl.bfloat16))
    factor_smem.slice(PART * 32, 32, 0).store(power_of_two(exponent) * (SCALE * LOG2E))
    fence_async_shared()


@gluon.jit
def start_scores(q_latent_smem, q_rope_smem, latent_smem, rope_smem, full_left, full_right, tile, empty_scores):
    stage = tile % 2
    left = latent_smem.index(stage * 2).permute((1, 0))
    right = latent_smem.index(stage * 2 + 1).permute((1, 0))
    mbarrier.wait(full_left.index(stage), tile // 2 & 1)
    s = warpgroup_mma(q_latent_smem.index(0), left, empty_scores, use_acc=False, is_async=True)
    mbarrier.wait(full_right.index(stage), tile // 2 & 1)
    s = warpgroup_mma(q_latent_smem.index(1), right, s, is_async=True)
    return warpgroup_mma(q_rope_smem, rope_smem.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def sum_in_threads(x):
    """Sums over the keys that a thread holds: [64, 64] → [64, 4]."""
    return gl.sum(gl.sum(gl.reshape(x, (64, 8, 4, 2)), 3), 1)


@gluon.jit
def weigh(s, out, scale, maximum, denominator, tile, exponent_smem, valid_smem, p_smem, factor_smem, s_done, p_full,
          p_empty):  # fmt: skip
    """Softmax of a tile's scores: P and the factor that sums so far change by go to shared memory."""
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.tensor_type.layout)
    scores = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(s_done, count=1)
    exponent = exponent_smem.index(tile % 2).load(KEYS)
    valid = valid_smem.index(tile % 2).load(KEYS)
    scores = scores * gl.expand_dims(power_of_two(exponent), 0)
    scores = scores * gl.expand_dims(scale, 1) + gl.expand_dims(valid, 0)
    new_maximum = gl.maximum(maximum, gl.max(scores, 1))
    # Without a valid key so far the maximum is −inf; −inf − −inf would be NaN.
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    p = gl.exp2(scores - gl.expand_dims(base, 1))
    rescale = gl.exp2(maximum - base)
    shares = sum_in_threads(p * gl.expand_dims(power_of_two(-exponent), 0))
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, shares.type.layout), assert_trivial=True)
    denominator = denominator * gl.expand_dims(factor, 1) + shares
    p = p.to(gl.float16)
    mbarrier.wait(p_empty, (tile & 1) ^ 1)
    factor_smem.store(rescale)
    p_smem.store(p)
    fence_async_shared()
    mbarrier.arrive(p_full, count=1)
    out = out * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, out.type.layout)), 1)
    return out, new_maximum, denominator


@gluon.jit
def attend_left(q_row, sink_ptr, out_row, lse_row, head_block, tiles, q_latent_smem, q_rope_smem, latent_smem,
                rope_smem, exponent_smem, valid_smem, seen_smem, p_smem, factor_smem, q_full, full_left, full_right,
                empty_left, s_done, p_full, p_empty, HEADS: gl.constexpr, Q_STRIDE_H: gl.constexpr,
                SCALE: gl.constexpr, HAS_SINK: gl.constexpr, EMPTY_LSE: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    H: gl.constexpr = 64
    N: gl.constexpr = 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    HEADS_S: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    HEADS_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    KEYS_S: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)

    store_queries(q_row, head_block, q_latent_smem, q_rope_smem, factor_smem, 0, HEADS, Q_STRIDE_H, SCALE)
    mbarrier.arrive(q_full, count=1)
    mbarrier.wait(q_full, 0)
    scale = factor_smem.load(HEADS_S)

    maximum = gl.full([H], float("-inf"), gl.float32, HEADS_S)
    denominator = sum_in_threads(gl.zeros([H, N], gl.float32, S_LAYOUT))
    out = gl.zeros([H, 256], gl.float32, O_LAYOUT)
    empty_scores = gl.zeros([H, N], gl.float32, S_LAYOUT)
    s = start_scores(q_latent_smem, q_rope_smem, latent_smem, rope_smem, full_left, full_right, 0, empty_scores)
    for tile in range(0, tiles - 1):
        out, maximum, denominator = weigh(
            s, out, scale, maximum, denominator, tile, exponent_smem, valid_smem, p_smem, factor_smem, s_done, p_full,
            p_empty,
        )  # fmt: skip
        running = warpgroup_mma(p_smem, latent_smem.index(tile % 2 * 2), out, is_async=True)
        s = start_scores(
            q_latent_smem, q_rope_smem, latent_smem, rope_smem, full_left, full_right, tile + 1, empty_scores
        )
        out = warpgroup_mma_wait(3, deps=[running])
        mbarrier.arrive(empty_left.index(tile % 2), count=1)
    tile = tiles - 1
    out, maximum, denominator = weigh(
        s, out, scale, maximum, denominator, tile, exponent_smem, valid_smem, p_smem, factor_smem, s_done, p_full,
        p_empty,
    )  # fmt: skip
    running = warpgroup_mma(p_smem, latent_smem.index(tile % 2 * 2), out, is_async=True)

    denominator = gl.convert_layout(gl.sum(denominator, 1), HEADS_S)
    rows = gl.arange(0, H, layout=HEADS_S) + head_block * H
    has_keys = (gl.max(seen_smem.load(KEYS_S), 0) > 0) & (rows < HEADS)
    if SPLIT:
        inverse = gl.where(has_keys, 1.0 / denominator, -1.0)
        lse = gl.where(has_keys, maximum + gl.log2(denominator), float("-inf"))
    else:
        base = gl.where(has_keys, maximum, 0.0)
        total = denominator
        if HAS_SINK:
            sink = gl.load(sink_ptr + rows, mask=rows < HEADS, other=0.0) * LOG2E
            total += gl.exp2(sink - base)
        inverse = gl.where(has_keys, 1.0 / total, -1.0)
        lse = gl.where(has_keys, (base + gl.log2(denominator)) * LN2, EMPTY_LSE)
    gl.store(lse_row + rows, lse, mask=rows < HEADS)
    mbarrier.wait(p_empty, tile & 1)
    mbarrier.arrive(s_done, count=1)
    factor_smem.store(inverse)
    mbarrier.arrive(p_full, count=1)
    out = warpgroup_mma_wait(0, deps=[running])
    store_half(out, gl.convert_layout(inverse, HEADS_O), out_row, 0, head_block, latent_smem.index(0), HEADS, SPLIT)


@gluon.jit
def attend_right(cache, slots_row, num_slots, first, end, q_row, out_row, head_block, tiles, q_latent_smem, q_rope_smem,
                 latent_smem, p_smem, factor_smem, q_full, full_right, empty_right, s_done, p_full, p_empty,
                 HEADS: gl.constexpr, Q_STRIDE_H: gl.constexpr, SCALE: gl.constexpr, SPLIT: gl.constexpr,
                 PAGE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, ROW: gl.constexpr):  # fmt: skip
    AHEADS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))
    for tile in gl.static_range(1, AHEAD):
        ahead = load_slots(slots_row, first + tile * 64, end, AHEADS)
        prefetch(cache, ahead, num_slots, PAGE_STRIDE, PAGE_SIZE, ROW)
    ahead = load_slots(slots_row, first + AHEAD * 64, end, AHEADS)
    store_queries(q_row, head_block, q_latent_smem, q_rope_smem, factor_smem, 1, HEADS, Q_STRIDE_H, SCALE)
    mbarrier.arrive(q_full, count=1)
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    HEADS_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    out = gl.zeros([64, 256], gl.float32, O_LAYOUT)
    for tile in range(0, tiles):
        stage = tile % 2
        mbarrier.wait(p_full, tile & 1)
        p = p_smem.load(gl.DotOperandLayout(0, O_LAYOUT, 2))
        factor = factor_smem.load(HEADS_O)
        mbarrier.arrive(p_empty, count=1)
        out = out * gl.expand_dims(factor, 1)
        # While the other consumer computes the next tile's softmax nobody else needs the tensor cores.
        mbarrier.wait(s_done, (tile + 1) & 1)
        mbarrier.wait(full_right.index(stage), tile // 2 & 1)
        running = warpgroup_mma(p, latent_smem.index(stage * 2 + 1), out, is_async=True)
        prefetch(cache, ahead, num_slots, PAGE_STRIDE, PAGE_SIZE, ROW)
        ahead = load_slots(slots_row, first + (tile + AHEAD + 1) * 64, end, AHEADS)
        out = warpgroup_mma_wait(0, deps=[running])
        mbarrier.arrive(empty_right.index(stage), count=1)
    mbarrier.wait(p_full, tiles & 1)
    store_half(out, factor_smem.load(HEADS_O), out_row, 256, head_block, latent_smem.index(1), HEADS, SPLIT)


@gluon.jit
def store_half(out, share, out_row, FIRST: gl.constexpr, head_block, smem, HEADS: gl.constexpr, SPLIT: gl.constexpr):
    """Half of the output's columns; the narrow type through `smem`, which nobody needs any more, to whole sectors."""
    share = gl.expand_dims(share, 1)
    result = gl.where(share < 0.0, 0.0, out * share).to(out_row.dtype.element_ty)
    if SPLIT:
        store_rows(result, out_row + FIRST, head_block, HEADS)
    else:
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        staged = smem._reinterpret(out_row.dtype.element_ty, [64, 256], smem.layout)
        staged.store(result)
        gl.barrier()
        store_rows(staged.load(ROWS), out_row + FIRST, head_block, HEADS)


@gluon.jit
def store_rows(result, out_row, head_block, HEADS: gl.constexpr):
    offs_h = head_block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, result.type.layout))
    offs_l = gl.arange(0, 256, layout=gl.SliceLayout(0, result.type.layout))
    out_ptrs = out_row + gl.expand_dims(offs_h * 512, 1) + gl.expand_dims(offs_l, 0)
    gl.store(out_ptrs, result, mask=gl.expand_dims(offs_h < HEADS, 1))


@gluon.jit(do_not_specialize=["num_slots", "num_keys", "num_splits", "split_keys"])
def sparse_mla_sm90_kernel(
    q_ptr,  # [T, H, L+E]
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T, K] i32
    lengths_ptr,  # [T] i32 if HAS_LENGTHS
    sink_ptr,  # [H] f32 if HAS_SINK
    num_slots,
    num_keys,  # K
    num_splits,
    split_keys,
    out_ptr,  # [T, H, L]; if SPLIT [T, num_splits, H, L] f32, normalised
    lse_ptr,  # [T, H] f32; if SPLIT [T, num_splits, H] f32, in log2
    Q_STRIDE_T: gl.constexpr,
    Q_STRIDE_H: gl.constexpr,
    SLOT_STRIDE: gl.constexpr,
    PAGE_STRIDE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROW: gl.constexpr,
    SCALE_OFFSET: gl.constexpr,
    ROPE_OFFSET: gl.constexpr,
    HEADS: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    SCALE: gl.constexpr,
    EMPTY_LSE: gl.constexpr,
    SPLIT: gl.constexpr,
):
    H: gl.constexpr = 64
    N: gl.constexpr = 64
    L: gl.constexpr = 512
    SMEM_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SMEM_V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    HEAD_BLOCKS: gl.constexpr = (HEADS + H - 1) // H
    pid = gl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    split = pid // HEAD_BLOCKS % num_splits
    token = (pid // HEAD_BLOCKS // num_splits).to(gl.int64)
    cache = cache_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
    slots_row = slots_ptr + token * SLOT_STRIDE
    place = token * HEADS
    if SPLIT:
        place = (token * num_splits + split) * HEADS

    end = num_keys
    if HAS_LENGTHS:
        end = gl.minimum(gl.load(lengths_ptr + token), num_keys)
    first = split * split_keys
    end = gl.minimum(end, first + split_keys)
    tiles = gl.maximum(gl.cdiv(end - first, N), 1)  # one without a key where there is none

    q_latent_smem = gl.allocate_shared_memory(gl.float16, [2, H, L // 2], SMEM_L)
    q_rope_smem = gl.allocate_shared_memory(gl.bfloat16, [H, 64], SMEM_L)
    latent_smem = gl.allocate_shared_memory(gl.float16, [4, N, L // 2], SMEM_L)  # stage, half
    rope_smem = gl.allocate_shared_memory(gl.bfloat16, [2, N, 64], SMEM_L)
    p_smem = gl.allocate_shared_memory(gl.float16, [H, N], SMEM_L)
    exponent_smem = gl.allocate_shared_memory(gl.int32, [2, N], SMEM_V)
    valid_smem = gl.allocate_shared_memory(gl.float32, [2, N], SMEM_V)
    seen_smem = gl.allocate_shared_memory(gl.int32, [N], SMEM_V)
    factor_smem = gl.allocate_shared_memory(gl.float32, [H], SMEM_V)
    full_left = mbarrier.allocate_mbarrier(batch=2)
    full_right = mbarrier.allocate_mbarrier(batch=2)
    empty_left = mbarrier.allocate_mbarrier(batch=2)
    empty_right = mbarrier.allocate_mbarrier(batch=2)
    s_done = mbarrier.allocate_mbarrier()
    q_full = mbarrier.allocate_mbarrier()
    p_full = mbarrier.allocate_mbarrier()
    p_empty = mbarrier.allocate_mbarrier()
    for stage in gl.static_range(2):
        mbarrier.init(full_left.index(stage), count=1)
        mbarrier.init(full_right.index(stage), count=1)
        mbarrier.init(empty_left.index(stage), count=1)
        mbarrier.init(empty_right.index(stage), count=1)
    mbarrier.init(s_done, count=1)
    mbarrier.init(q_full, count=2)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)

    q_row = q_ptr + token * Q_STRIDE_T
    out_row = out_ptr + place * L
    gl.warp_specialize(
        [
            (attend_left, (
                q_row, sink_ptr, out_row, lse_ptr + place, head_block, tiles, q_latent_smem, q_rope_smem, latent_smem,
                rope_smem, exponent_smem, valid_smem, seen_smem, p_smem, factor_smem, q_full, full_left, full_right,
                empty_left, s_done, p_full, p_empty, HEADS, Q_STRIDE_H, SCALE, HAS_SINK, EMPTY_LSE, SPLIT,
            )),
            (attend_right, (
                cache, slots_row, num_slots, first, end, q_row, out_row, head_block, tiles, q_latent_smem, q_rope_smem,
                latent_smem, p_smem, factor_smem, q_full, full_right, empty_right, s_done, p_full, p_empty, HEADS,
                Q_STRIDE_H, SCALE, SPLIT, PAGE_STRIDE, PAGE_SIZE, ROW,
            )),
            (produce, (
                cache, slots_row, num_slots, first, end, tiles, latent_smem, rope_smem, exponent_smem, valid_smem,
                seen_smem, full_left, full_right, empty_left, empty_right, PAGE_STRIDE, PAGE_SIZE, ROW, SCALE_OFFSET,
                ROPE_OFFSET,
            )),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
