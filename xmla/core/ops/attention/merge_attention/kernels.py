import triton
import triton.language as tl

from xmla.core.lang.numbers import LN2, LOG2E
from xmla.core.lang.offsets import offset_of


@triton.jit
def load_lse(lses_ptr, offset, head_ok):
    """Natural lse of one part [BLOCK_H]; both marks of a part without keys become −inf."""
    lse = tl.load(lses_ptr + offset, mask=head_ok, other=float("-inf"))
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def merge_attention_kernel(
    outs_ptr,  # [W, T, H, L]
    lses_ptr,  # [W, T, H] f32
    sink_ptr,  # [H] f32 if HAS_SINK
    num_parts,
    out_units_w,  # the stride of W, in units, which the compiler then knows to divide it
    lse_units_w,
    out_ptr,  # [T, H, L]
    lse_ptr,  # [T, H] f32
    OUT_UNIT: tl.constexpr,
    LSE_UNIT: tl.constexpr,
    OUT_STRIDE_T: tl.constexpr,
    OUT_STRIDE_H: tl.constexpr,
    LSE_STRIDE_T: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_SINK: tl.constexpr,
    EMPTY_LSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    offs_h = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_l = tl.arange(0, BLOCK_L)[None, :]
    head_ok = offs_h < HEADS
    latent_ok = offs_l < LATENT
    out_stride_w = offset_of(out_units_w, OUT_UNIT)
    lse_stride_w = offset_of(lse_units_w, LSE_UNIT)
    lse_row = offset_of(token, LSE_STRIDE_T) + offs_h
    out_row = offset_of(token, OUT_STRIDE_T) + offset_of(offs_h, OUT_STRIDE_H, HEADS)

    maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
    part_row = lse_row  # [BLOCK_H] i64
    for _ in tl.range(0, num_parts):
        maximum = tl.maximum(maximum, load_lse(lses_ptr, part_row, head_ok), tl.PropagateNan.ALL)
        part_row += lse_stride_w
    # Without keys the maximum is −inf; −inf − −inf would be NaN.
    base = tl.where(maximum == float("-inf"), 0.0, maximum)

    denominator = tl.zeros([BLOCK_H], tl.float32)
    accumulator = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for _ in tl.range(0, num_parts):
        lse = load_lse(lses_ptr, lse_row, head_ok)
        has_keys = lse != float("-inf")  # true of NaN
        weight = tl.exp2((lse - base) * LOG2E)
        mask = (head_ok & has_keys)[:, None] & latent_ok
        part = tl.load(outs_ptr + out_row[:, None] + offs_l, mask=mask, other=0.0)  # [BLOCK_H, BLOCK_L]
        denominator += weight
        accumulator += part.to(tl.float32) * weight[:, None]
        lse_row += lse_stride_w
        out_row += out_stride_w

    has_keys = maximum != float("-inf")
    whole = denominator
    if HAS_SINK:
        whole += tl.exp2((tl.load(sink_ptr + offs_h, mask=head_ok, other=0.0) - base) * LOG2E)
    out = tl.where(has_keys[:, None], accumulator / whole[:, None], 0.0)
    row = offset_of(token, HEADS) + offs_h
    out_ptrs = out_ptr + offset_of(row[:, None], LATENT) + offs_l
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=head_ok[:, None] & latent_ok)
    tl.store(lse_ptr + row, tl.where(has_keys, base + tl.log2(denominator) * LN2, EMPTY_LSE), mask=head_ok)
