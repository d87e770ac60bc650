import triton
import triton.language as tl

from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.numbers import dequantize_mxfp4, quantize, quantize_mxfp4
from xmla.core.lang.offsets import offset_of


@triton.jit
def quantize_indexer_query_kernel(
    q_ptr,  # [T, I, D]
    weights_ptr,  # [T, I]
    num_rows,  # T · I
    q8_ptr,  # [T, I, D] e4m3 | bf16
    folded_weights_ptr,  # [T, I] f32
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_I: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SCALE: tl.constexpr,
    MXFP4: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP_LIMIT: tl.constexpr,
):
    let_next_start(OVERLAP_LIMIT)
    wait_for_earlier(OVERLAP_LIMIT)
    row = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)  # [BLOCK] rows of (token, head)
    ok = row < num_rows
    token, head = row // HEADS, row % HEADS
    offs_d = tl.arange(0, D)[None, :]
    q_row = offset_of(token, Q_STRIDE_T) + offset_of(head, Q_STRIDE_I)
    x = tl.load(q_ptr + q_row[:, None] + offs_d, mask=ok[:, None], other=0.0)
    weights = tl.load(weights_ptr + offset_of(token, WEIGHT_STRIDE) + head, mask=ok, other=0.0).to(tl.float32)
    if MXFP4:
        packed, exponents = quantize_mxfp4(x.to(tl.float32), MIN_EXPONENT)
        values = dequantize_mxfp4(packed, exponents)  # [BLOCK, D] bf16
    else:
        values, scales = quantize(x.to(tl.float32), 1, MIN_EXPONENT)  # [BLOCK, D] u8, [BLOCK] f32
        weights *= scales
    tl.store(q8_ptr + offset_of(row[:, None], D) + offs_d, values, mask=ok[:, None])
    tl.store(folded_weights_ptr + row, weights * SCALE, mask=ok)
