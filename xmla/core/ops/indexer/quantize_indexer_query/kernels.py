import triton
import triton.language as tl

from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.numbers import dequantize_mxfp4, quantize, quantize_mxfp4
from xmla.core.lang.offsets import offset_of


@triton.jit
def quantize_rows(program, q_ptr, weights_ptr, num_rows, q8_ptr, folded_weights_ptr, C: tl.constexpr):
    """Quantise C.BLOCK heads, and fold their scales into their weights."""
    BLOCK: tl.constexpr = C.BLOCK
    D: tl.constexpr = C.D
    row = offset_of(program, BLOCK) + tl.arange(0, BLOCK)  # [BLOCK] rows of (token, head)
    ok = row < num_rows
    token, head = row // C.HEADS, row % C.HEADS
    offs_d = tl.arange(0, D)[None, :]
    q_row = offset_of(token, C.Q_STRIDE_T) + offset_of(head, C.Q_STRIDE_I)
    x = tl.load(q_ptr + q_row[:, None] + offs_d, mask=ok[:, None], other=0.0)
    weights = tl.load(weights_ptr + offset_of(token, C.WEIGHT_STRIDE) + head, mask=ok, other=0.0).to(tl.float32)
    if C.MXFP4:
        packed, exponents = quantize_mxfp4(x.to(tl.float32), C.MIN_EXPONENT)
        values = dequantize_mxfp4(packed, exponents)  # [BLOCK, D] bf16
    else:
        values, scales = quantize(x.to(tl.float32), 1, C.MIN_EXPONENT)  # [BLOCK, D] u8, [BLOCK] f32
        weights *= scales
    tl.store(q8_ptr + offset_of(row[:, None], D) + offs_d, values, mask=ok[:, None])
    tl.store(folded_weights_ptr + row, weights * C.SCALE, mask=ok)


@triton.jit
def quantize_indexer_query_kernel(
    q_ptr,  # [T, I, D]
    weights_ptr,  # [T, I]
    num_rows,  # T · I
    q8_ptr,  # [T, I, D] e4m3 | bf16
    folded_weights_ptr,  # [T, I] f32
    C: tl.constexpr,  # QuantizedQuery
):
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    quantize_rows(tl.program_id(0), q_ptr, weights_ptr, num_rows, q8_ptr, folded_weights_ptr, C)
