"""Attention over V3.2 pages on Hopper, in Gluon: conversion, softmax and tensor cores overlap by hand.

One program: 64 heads of a token against 64 keys at a time, 8 warps, all of them doing everything. While the tensor
cores multiply P·V of one tile, the warps convert the next from e4m3 to float16 in shared memory and start its Q·Kᵀ; the
loads of the tile after that are in flight in registers all the while. Two warpgroups split the keys of S and the latent
dims of the output.

Numbers: float16 holds e4m3 exactly. An entry comes divided by 2**e, the largest of its scales rounded down to a power
of two, and a row of Q by such a power too; scores get both back in float32. The values keep the divisor, so the
probabilities carry 2**e instead: they are 2**(score + e − maximum) with the maximum over score + e.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from xmla.core.lang import LN2, LOG2E


@gluon.jit
def exponent_of(x):
    """The largest integer e with 2**e ≤ |x|, from the bits of float32 `x`, within ±100."""
    bits = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return gl.minimum(gl.maximum((bits >> 23) - 127, -100), 100)


@gluon.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def finite_abs(x):
    return gl.where(x == x, gl.abs(x), 0.0)


@gluon.jit
def load_slots(slots_ptr, start, end, LAYOUT: gl.constexpr):
    """The slots of 64 entries, −1 past the end."""
    offs = start + gl.arange(0, 64, layout=LAYOUT)
    return gl.load(slots_ptr + offs, mask=offs < end, other=-1)


@gluon.jit
def entry_rows(slots_smem, num_slots, PAGE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, ROW: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """Byte offset of each of 64 entries, and which of them are valid."""
    slot = slots_smem.load(LAYOUT)
    ok = (slot >= 0) & (slot < num_slots)
    return (slot // PAGE_SIZE).to(gl.int64) * PAGE_STRIDE + (slot % PAGE_SIZE) * ROW, ok


@gluon.jit
def load_tile(cache_ptr, slots_smem, num_slots, PAGE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, ROW: gl.constexpr,
              SCALE_OFFSET: gl.constexpr, ROPE_OFFSET: gl.constexpr, WORDS: gl.constexpr,
              ROPES: gl.constexpr):  # fmt: skip
    """Raw entries in registers: e4m3 as words [64, 4, 16, 2] i32, scales [64, 4] f32, rope [64, 64] bf16."""
    GROUPS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, WORDS))
    row, ok = entry_rows(slots_smem, num_slots, PAGE_STRIDE, PAGE_SIZE, ROW, gl.SliceLayout(1, GROUPS))
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    pair = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, WORDS))))
    word = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, WORDS))))
    base = cache_ptr + gl.expand_dims(row, 1)  # [64, 1]
    ok1 = gl.expand_dims(ok, 1)
    scale_ptr = (base + SCALE_OFFSET + gl.expand_dims(group, 0) * 4).to(gl.pointer_type(gl.float32), bitcast=True)
    scales = gl.load(scale_ptr, mask=ok1, other=0.0)
    pairs = gl.expand_dims(gl.expand_dims(pair, 0), 0) * 8  # [1, 1, 16]
    pairs_ptr = gl.expand_dims(base + gl.expand_dims(group, 0) * 128, 2) + pairs  # [64, 4, 16]
    words_ptr = gl.expand_dims(pairs_ptr.to(gl.pointer_type(gl.int32), bitcast=True), 3)
    words_ptr += gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 0), 0)
    words = gl.load(words_ptr, mask=gl.expand_dims(gl.expand_dims(ok1, 2), 3), other=0)

    rope_row, rope_ok = entry_rows(slots_smem, num_slots, PAGE_STRIDE, PAGE_SIZE, ROW, gl.SliceLayout(1, ROPES))
    offs_e = gl.arange(0, 64, layout=gl.SliceLayout(0, ROPES))
    rope_ptr = (cache_ptr + gl.expand_dims(rope_row, 1) + ROPE_OFFSET).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    rope = gl.load(rope_ptr + gl.expand_dims(offs_e, 0), mask=gl.expand_dims(rope_ok, 1), other=0.0)
    return words, scales, rope


@gluon.jit
def store_tile(words, scales, rope, latent_smem, rope_smem, exponent_smem, ROPES: gl.constexpr):
    """Convert a raw tile and store it: latent and rope divided by 2**exponent, and the exponents."""
    exponent = exponent_of(gl.max(finite_abs(scales), 1))  # [64]
    ratio = (scales * gl.expand_dims(power_of_two(-exponent), 1)).to(gl.float16).to(gl.int16, bitcast=True)
    twice = (ratio.to(gl.int32) & 0xFFFF) * 0x10001
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
    halves = gl.reshape(gl.join(low, high), (64, 256))
    latent_smem.store(halves)
    exponent_smem.store(exponent)
    gl.barrier()
    by_row = exponent_smem.load(gl.SliceLayout(1, ROPES))
    rope_smem.store((rope.to(gl.float32) * gl.expand_dims(power_of_two(-by_row), 1)).to(gl.bfloat16))


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
    E: gl.constexpr = 64
    # Accumulators: two warpgroups side by side, over keys in S and over latent dims in the output.
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4, 1, 2], [4, 1, 8, 1], [8, 1, 1, 1], [3, 2, 1, 0])
    ROPES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SLOTS: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    QUERIES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    SMEM_L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SMEM_W: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    SMEM_V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    HEAD_BLOCKS: gl.constexpr = (HEADS + H - 1) // H
    pid = gl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    split = pid // HEAD_BLOCKS % num_splits
    token = (pid // HEAD_BLOCKS // num_splits).to(gl.int64)
    cache = cache_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
    slots_row = slots_ptr + token * SLOT_STRIDE

    q_latent_smem = gl.allocate_shared_memory(gl.float16, [H, L], SMEM_L)
    q_rope_smem = gl.allocate_shared_memory(gl.bfloat16, [H, E], SMEM_L)
    latent_smem = gl.allocate_shared_memory(gl.float16, [2, N, L], SMEM_L)
    rope_smem = gl.allocate_shared_memory(gl.bfloat16, [2, N, E], SMEM_L)
    p_smem = gl.allocate_shared_memory(gl.float16, [H, N], SMEM_L)
    exponent_smem = gl.allocate_shared_memory(gl.int32, [2, N], SMEM_V)
    slots_smem = gl.allocate_shared_memory(gl.int32, [4, N], SMEM_V)

    # Queries, each row divided by the power of two of its largest value.
    offs_h = head_block * H + gl.arange(0, H, layout=gl.SliceLayout(1, QUERIES))
    offs_l = gl.arange(0, L, layout=gl.SliceLayout(0, QUERIES))
    q_row = q_ptr + token * Q_STRIDE_T + gl.expand_dims(offs_h, 1) * Q_STRIDE_H
    head_ok = gl.expand_dims(offs_h < HEADS, 1)
    q = gl.load(q_row + gl.expand_dims(offs_l, 0), mask=head_ok, other=0.0).to(gl.float32)
    q_exponent = exponent_of(gl.max(finite_abs(q), 1))
    divisor = gl.expand_dims(power_of_two(-q_exponent), 1)
    q_latent_smem.store((q * divisor).to(gl.float16))
    offs_e = gl.arange(0, E, layout=gl.SliceLayout(0, QUERIES))
    q_rope = gl.load(q_row + L + gl.expand_dims(offs_e, 0), mask=head_ok, other=0.0).to(gl.float32)
    q_rope_smem.store((q_rope * divisor).to(gl.bfloat16))
    scale = gl.convert_layout(power_of_two(q_exponent), gl.SliceLayout(1, S_LAYOUT)) * (SCALE * LOG2E)  # [H]

    end = num_keys
    if HAS_LENGTHS:
        end = gl.minimum(gl.load(lengths_ptr + token), num_keys)
    first = split * split_keys
    end = gl.minimum(end, first + split_keys)
    tiles = gl.cdiv(gl.maximum(end - first, 0), N)

    maximum = gl.full([H], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    denominator = gl.zeros([H], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    out = gl.zeros([H, L], gl.float32, O_LAYOUT)
    empty = gl.zeros([H, N], gl.float32, S_LAYOUT)

    # Slots stand in shared memory three tiles ahead: nothing waits for them when their entries are loaded.
    for ahead in gl.static_range(3):
        slots_smem.index(ahead).store(load_slots(slots_row, first + ahead * N, end, SLOTS))
    gl.barrier()
    words, scales, rope = load_tile(
        cache, slots_smem.index(0), num_slots, PAGE_STRIDE, PAGE_SIZE, ROW, SCALE_OFFSET, ROPE_OFFSET, WORDS, ROPES
    )
    store_tile(
        words, scales, rope, latent_smem.index(0)._reinterpret(gl.int32, [N, L // 2], SMEM_W), rope_smem.index(0),
        exponent_smem.index(0), ROPES,
    )  # fmt: skip
    words, scales, rope = load_tile(
        cache, slots_smem.index(1), num_slots, PAGE_STRIDE, PAGE_SIZE, ROW, SCALE_OFFSET, ROPE_OFFSET, WORDS, ROPES
    )
    fence_async_shared()
    gl.barrier()
    s = warpgroup_mma(q_latent_smem, latent_smem.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    s = warpgroup_mma(q_rope_smem, rope_smem.index(0).permute((1, 0)), s, is_async=True)

    for tile in range(0, tiles):
        start = first + tile * N
        now = tile % 2
        later = 1 - now
        slots = load_slots(slots_row, start + 3 * N, end, SLOTS)
        slot = slots_smem.index(tile % 4).load(gl.SliceLayout(0, S_LAYOUT))
        ok = (slot >= 0) & (slot < num_slots)
        exponent = exponent_smem.index(now).load(gl.SliceLayout(0, S_LAYOUT))

        scores = warpgroup_mma_wait(0, deps=[s])
        scores = scores * gl.expand_dims(scale, 1) * gl.expand_dims(power_of_two(exponent), 0)
        scores = gl.where(gl.expand_dims(ok, 0), scores + gl.expand_dims(exponent.to(gl.float32), 0), float("-inf"))
        new_maximum = gl.maximum(maximum, gl.max(scores, 1))
        # Without a valid key so far the maximum is −inf; −inf − −inf would be NaN.
        base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probabilities = gl.exp2(scores - gl.expand_dims(base, 1))
        rescale = gl.exp2(maximum - base)
        shares = probabilities * gl.expand_dims(power_of_two(-exponent), 0)
        denominator = denominator * rescale + gl.sum(shares, 1)
        maximum = new_maximum
        out = out * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT)), 1)
        p_smem.store(probabilities.to(gl.float16))
        fence_async_shared()
        gl.barrier()
        running = warpgroup_mma(p_smem, latent_smem.index(now), out, is_async=True)

        store_tile(
            words, scales, rope, latent_smem.index(later)._reinterpret(gl.int32, [N, L // 2], SMEM_W),
            rope_smem.index(later), exponent_smem.index(later), ROPES,
        )  # fmt: skip
        fence_async_shared()
        gl.barrier()
        s = warpgroup_mma(q_latent_smem, latent_smem.index(later).permute((1, 0)), empty, use_acc=False, is_async=True)
        s = warpgroup_mma(q_rope_smem, rope_smem.index(later).permute((1, 0)), s, is_async=True)
        words, scales, rope = load_tile(
            cache, slots_smem.index((tile + 2) % 4), num_slots, PAGE_STRIDE, PAGE_SIZE, ROW, SCALE_OFFSET, ROPE_OFFSET,
            WORDS, ROPES,
        )  # fmt: skip
        slots_smem.index((tile + 3) % 4).store(slots)
        out = warpgroup_mma_wait(2, deps=[running])
    warpgroup_mma_wait(0, deps=[s])

    offs_h = head_block * H + gl.arange(0, H, layout=gl.SliceLayout(1, O_LAYOUT))
    offs_l = gl.arange(0, L, layout=gl.SliceLayout(0, O_LAYOUT))
    rows = gl.arange(0, H, layout=gl.SliceLayout(1, S_LAYOUT)) + head_block * H
    has_keys = denominator != 0.0  # true of NaN, which a key that is NaN rightly gives
    if SPLIT:
        inverse = gl.where(has_keys, 1.0 / denominator, 0.0)
        lse = gl.where(has_keys, maximum + gl.log2(denominator), float("-inf"))
        place = (token * num_splits + split) * HEADS
    else:
        base = gl.where(has_keys, maximum, 0.0)
        total = denominator
        if HAS_SINK:
            sink = gl.load(sink_ptr + rows, mask=rows < HEADS, other=0.0) * LOG2E
            total += gl.exp2(sink - base)
        inverse = gl.where(has_keys, 1.0 / total, 0.0)
        lse = gl.where(has_keys, (base + gl.log2(denominator)) * LN2, EMPTY_LSE)
        place = token * HEADS
    gl.store(lse_ptr + place + rows, lse, mask=rows < HEADS)
    share = gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT))
    has = gl.convert_layout(has_keys.to(gl.int32), gl.SliceLayout(1, O_LAYOUT)) != 0
    result = gl.where(gl.expand_dims(has, 1), out * gl.expand_dims(share, 1), 0.0)
    out_ptrs = out_ptr + gl.expand_dims((place + offs_h) * L, 1) + gl.expand_dims(offs_l, 0)
    gl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(offs_h < HEADS, 1))
