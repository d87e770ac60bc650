import triton
import triton.language as tl

from xmla.core.lang.indexer import store_keys
from xmla.core.lang.offsets import offset_of


@triton.jit
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
    slot = tl.load(slots_ptr + offset_of(token, SLOT_STRIDE), mask=token < num_tokens, other=-1)
    ok = (slot >= 0) & (slot < num_slots)
    offs_d = tl.arange(0, D)[None, :]
    x = tl.load(keys_ptr + offset_of(token[:, None], KEY_STRIDE) + offs_d, mask=ok[:, None], other=0.0)
    store_keys(cache_ptr, slot, ok, x.to(tl.float32), MXFP4, PAGE_STRIDE, PAGE_SIZE, MIN_EXPONENT)
