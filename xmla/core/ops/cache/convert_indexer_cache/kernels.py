import triton
import triton.language as tl

from xmla.core.lang.indexer import load_page_keys, store_keys
from xmla.core.lang.offsets import offset_of


@triton.jit
def convert_indexer_cache_kernel(
    source_ptr,  # SOURCE_P pages of SOURCE_R rows of values and SOURCE_R times 4 bytes of scales
    source_slots_ptr,  # [T] i32 | i64
    slots_ptr,  # [T] i32 | i64
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales, updated in place
    num_tokens,
    num_source_slots,
    num_slots,
    SOURCE_SLOT_STRIDE: tl.constexpr,
    SOURCE_PAGE_STRIDE: tl.constexpr,
    SOURCE_PAGE_SIZE: tl.constexpr,
    SOURCE_FORMAT: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    D: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [BLOCK_T]
    source_slot = tl.load(source_slots_ptr + offset_of(token, SOURCE_SLOT_STRIDE), mask=token < num_tokens, other=-1)
    slot = tl.load(slots_ptr + offset_of(token, SLOT_STRIDE), mask=token < num_tokens, other=-1)
    ok = (source_slot >= 0) & (source_slot < num_source_slots) & (slot >= 0) & (slot < num_slots)
    page = tl.where(ok, source_slot // SOURCE_PAGE_SIZE, -1)
    keys, factors, _ = load_page_keys(
        source_ptr, page, source_slot, num_source_slots // SOURCE_PAGE_SIZE, SOURCE_PAGE_STRIDE, SOURCE_PAGE_SIZE, D,
        SOURCE_FORMAT,
    )  # fmt: skip
    x = keys.to(tl.float32) * factors[:, None]  # [BLOCK_T, D]
    store_keys(cache_ptr, slot, ok, x, FORMAT, PAGE_STRIDE, PAGE_SIZE, MIN_EXPONENT)
