import triton
import triton.language as tl

from xmla.core.lang.numbers import as_bytes, as_words
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import load_slot


@triton.jit
def read_indexer_cache_kernel(
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales
    slots_ptr,  # [T] i32 | i64
    num_tokens,
    num_slots,
    keys_ptr,  # [T, VALUE_BYTES] of any one-byte dtype
    key_scales_ptr,  # [T] f32 | i32
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    stored = token < num_tokens
    slot, ok = load_slot(slots_ptr, token, stored, num_slots, SLOT_STRIDE)
    base = offset_of(slot // PAGE_SIZE, PAGE_STRIDE)
    offset = slot % PAGE_SIZE
    cache = as_bytes(cache_ptr)

    offs_b = tl.arange(0, VALUE_BYTES)[None, :]
    rows = cache + (base + offset_of(offset, VALUE_BYTES, PAGE_SIZE))[:, None]
    values = tl.load(rows + offs_b, mask=ok[:, None], other=0)
    tl.store(as_bytes(keys_ptr) + offset_of(token[:, None], VALUE_BYTES) + offs_b, values, mask=stored[:, None])
    footer = cache + base + PAGE_SIZE * VALUE_BYTES + offset_of(offset, 4, PAGE_SIZE)
    scales = tl.load(as_words(footer), mask=ok, other=0)
    tl.store(as_words(key_scales_ptr) + token, scales, mask=stored)
