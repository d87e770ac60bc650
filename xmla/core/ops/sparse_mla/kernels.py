import triton
import triton.language as tl

from xmla.core.lang import LN2, LOG2E, as_bytes, as_floats, page_base


@triton.jit
def load_entries(
    cache_ptr, row, ok, dtype: tl.constexpr, PACKED: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    TILE: tl.constexpr, SCALE_OFFSET: tl.constexpr, ROPE_OFFSET: tl.constexpr,
):  # fmt: skip
    """Entries at element offsets `row` [BLOCK_N] where `ok`, else zeros: latent [BLOCK_N, L], rope [BLOCK_N, E]."""
    offs_l = tl.arange(0, LATENT)[None, :]
    offs_e = tl.arange(0, ROPE)[None, :]
    if PACKED:
        cache = as_bytes(cache_ptr)
        raw = tl.load(cache + row[:, None] + offs_l, mask=ok[:, None], other=0)
        offs_g = tl.arange(0, LATENT // TILE)[None, :]
        scales = tl.load(as_floats(cache + row[:, None] + SCALE_OFFSET + 4 * offs_g), mask=ok[:, None], other=0.0)
        values = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        tiled = tl.reshape(values, (raw.shape[0], LATENT // TILE, TILE)) * scales[:, :, None]
        latent = tl.reshape(tiled, (raw.shape[0], LATENT)).to(dtype)
        rope_ptrs = (cache + row[:, None] + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16), bitcast=True) + offs_e
        rope = tl.load(rope_ptrs, mask=ok[:, None], other=0.0).to(dtype)
    else:
        latent = tl.load(cache_ptr + row[:, None] + offs_l, mask=ok[:, None], other=0.0)
        rope = tl.load(cache_ptr + row[:, None] + ROPE_OFFSET + offs_e, mask=ok[:, None], other=0.0)
    return latent, rope


@triton.jit
def finish(accumulator, denominator, maximum, sink_log2, EMPTY_LSE: tl.constexpr):
    """Output rows and natural lse of unnormalised sums: Σ 2**(s − maximum) v, Σ 2**(s − maximum), per head.

    The sink adds to the denominator only; a head without keys gives 0 whatever its sink.
    """
    has_keys = denominator != 0.0  # true of NaN, which a key that is NaN rightly gives
    base = tl.where(has_keys, maximum, 0.0)
    scale = 1.0 / (denominator + tl.exp2(sink_log2 - base))
    out = tl.where(has_keys[:, None], accumulator * scale[:, None], 0.0)
    lse = tl.where(has_keys, (base + tl.log2(denominator)) * LN2, EMPTY_LSE)
    return out, lse


@triton.jit(do_not_specialize=["num_slots", "num_keys", "num_splits", "split_keys"])
def sparse_mla_kernel(
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
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_H: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    PACKED: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SCALE: tl.constexpr,
    EMPTY_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Head blocks of one split are neighbours: they read the same entries.
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    head_block = pid % HEAD_BLOCKS
    split = pid // HEAD_BLOCKS % num_splits
    token = (pid // HEAD_BLOCKS // num_splits).to(tl.int64)

    offs_h = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = offs_h < HEADS
    offs_l = tl.arange(0, LATENT)
    q_row = q_ptr + token * Q_STRIDE_T + offs_h[:, None] * Q_STRIDE_H
    q = tl.load(q_row + offs_l[None, :], mask=head_ok[:, None], other=0.0)  # [BLOCK_H, L]
    q_rope = tl.load(q_row + LATENT + tl.arange(0, ROPE)[None, :], mask=head_ok[:, None], other=0.0)  # [BLOCK_H, E]

    end = num_keys
    if HAS_LENGTHS:
        end = tl.minimum(tl.load(lengths_ptr + token), num_keys)
    first = split * split_keys
    end = tl.minimum(end, first + split_keys)

    maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_H], tl.float32)
    accumulator = tl.zeros([BLOCK_H, LATENT], tl.float32)
    for start in tl.range(first, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots_ptr + token * SLOT_STRIDE + offs_n, mask=offs_n < end, other=-1)
        ok = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
        row = page_base(slot // PAGE_SIZE, PAGE_STRIDE) + (slot % PAGE_SIZE) * ROW
        latent, rope = load_entries(cache_ptr, row, ok, q.dtype, PACKED, LATENT, ROPE, TILE, SCALE_OFFSET, ROPE_OFFSET)
        scores = tl.dot(q, tl.trans(latent))  # [BLOCK_H, BLOCK_N] f32
        scores = tl.dot(q_rope, tl.trans(rope), scores) * (SCALE * LOG2E)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # Without a valid key so far the maximum is −inf; −inf − −inf would be NaN.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probabilities = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(maximum - base)
        denominator = denominator * rescale + tl.sum(probabilities, 1)
        accumulator = tl.dot(probabilities.to(latent.dtype), latent, accumulator * rescale[:, None])
        maximum = new_maximum

    if not SPLIT:
        sink_log2 = tl.full([BLOCK_H], float("-inf"), tl.float32)
        if HAS_SINK:
            sink_log2 = tl.load(sink_ptr + offs_h, mask=head_ok, other=0.0) * LOG2E
        out, lse = finish(accumulator, denominator, maximum, sink_log2, EMPTY_LSE)
        out_row = token * HEADS + offs_h
        tl.store(out_ptr + out_row[:, None] * LATENT + offs_l[None, :], out.to(q.dtype), mask=head_ok[:, None])
        tl.store(lse_ptr + out_row, lse, mask=head_ok)
    else:
        has_keys = denominator != 0.0
        out = tl.where(has_keys[:, None], accumulator / denominator[:, None], 0.0)
        out_row = (token * num_splits + split) * HEADS + offs_h
        tl.store(out_ptr + out_row[:, None] * LATENT + offs_l[None, :], out, mask=head_ok[:, None])
        lse_log2 = tl.where(has_keys, maximum + tl.log2(denominator), float("-inf"))
        tl.store(lse_ptr + out_row, lse_log2, mask=head_ok)


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits_kernel(
    split_out_ptr,  # [T, num_splits, H, L] f32, normalised
    split_lse_ptr,  # [T, num_splits, H] f32, log2
    sink_ptr,  # [H] f32 if HAS_SINK
    num_splits,
    out_ptr,  # [T, H, L]
    lse_ptr,  # [T, H] f32
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_SINK: tl.constexpr,
    EMPTY_LSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    offs_h = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = offs_h < HEADS
    offs_l = tl.arange(0, LATENT)

    maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for split in tl.range(0, num_splits):
        row = (token * num_splits + split) * HEADS + offs_h
        maximum = tl.maximum(maximum, tl.load(split_lse_ptr + row, mask=head_ok, other=float("-inf")))
    base = tl.where(maximum == float("-inf"), 0.0, maximum)

    denominator = tl.zeros([BLOCK_H], tl.float32)
    accumulator = tl.zeros([BLOCK_H, LATENT], tl.float32)
    for split in tl.range(0, num_splits):
        row = (token * num_splits + split) * HEADS + offs_h
        weight = tl.exp2(tl.load(split_lse_ptr + row, mask=head_ok, other=float("-inf")) - base)
        part = tl.load(split_out_ptr + row[:, None] * LATENT + offs_l[None, :], mask=head_ok[:, None], other=0.0)
        denominator += weight
        accumulator += part * weight[:, None]

    sink_log2 = tl.full([BLOCK_H], float("-inf"), tl.float32)
    if HAS_SINK:
        sink_log2 = tl.load(sink_ptr + offs_h, mask=head_ok, other=0.0) * LOG2E
    out, lse = finish(accumulator, denominator, base, sink_log2, EMPTY_LSE)
    row = token * HEADS + offs_h
    out_ptrs = out_ptr + row[:, None] * LATENT + offs_l[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=head_ok[:, None])
    tl.store(lse_ptr + row, lse, mask=head_ok)
