import triton
import triton.language as tl

from xmla.core.lang import as_bytes, as_floats, page_base, quantize, quantize_mxfp4


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write_indexer_cache_kernel(
    keys_ptr,  # [T, D]
    slots_ptr,  # [T] i32 | i64
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales, updated in place
    num_tokens,
    num_slots,
    KEY_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    MXFP4: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    slot = tl.load(slots_ptr + token.to(tl.int64) * SLOT_STRIDE, mask=token < num_tokens, other=-1)
    ok = (slot >= 0) & (slot < num_slots)
    base = page_base(slot // PAGE_SIZE, PAGE_STRIDE)
    offset = slot % PAGE_SIZE
    cache = as_bytes(cache_ptr)

    offs_d = tl.arange(0, D)[None, :]
    x = tl.load(keys_ptr + token.to(tl.int64)[:, None] * KEY_STRIDE + offs_d, mask=ok[:, None], other=0.0)
    if MXFP4:
        values, scales = quantize_mxfp4(x.to(tl.float32), MIN_EXPONENT)  # [BLOCK_T, D/2] u8, [BLOCK_T, D/32] u8
        offs_b = tl.arange(0, D // 2)[None, :]
        tl.store(cache + (base + offset * (D // 2))[:, None] + offs_b, values, mask=ok[:, None])
        footer = (cache + base + PAGE_SIZE * (D // 2) + offset * 4)[:, None]
        for unused in tl.static_range(D // 32, 4):
            tl.store(footer + unused, tl.full([BLOCK_T, 1], 127, tl.uint8), mask=ok[:, None])
        tl.store(footer + tl.arange(0, D // 32)[None, :], scales, mask=ok[:, None])
    else:
        values, scales = quantize(x.to(tl.float32), 1, MIN_EXPONENT)  # [BLOCK_T, D] e4m3, [BLOCK_T] f32
        tl.store(cache + (base + offset * D)[:, None] + offs_d, values.to(tl.uint8, bitcast=True), mask=ok[:, None])
        tl.store(as_floats(cache + base + PAGE_SIZE * D + offset * 4), scales, mask=ok)
