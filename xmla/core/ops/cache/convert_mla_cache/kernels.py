import triton
import triton.language as tl

from xmla.core.lang.entries import entry_offsets, load_entries, store_entries
from xmla.core.lang.offsets import offset_of


@triton.jit
def convert_mla_cache_kernel(
    source_ptr,  # [SOURCE_P, SOURCE_R, SOURCE_ROW]
    source_slots_ptr,  # [T] i32 | i64
    slots_ptr,  # [T] i32 | i64
    cache_ptr,  # [P, R, ROW], updated in place
    num_tokens,
    num_source_slots,
    num_slots,
    SOURCE_SLOT_STRIDE: tl.constexpr,
    SOURCE_PAGE_STRIDE: tl.constexpr,
    SOURCE_PAGE_SIZE: tl.constexpr,
    SOURCE_LAYOUT: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [BLOCK_T]
    source_slot = tl.load(source_slots_ptr + offset_of(token, SOURCE_SLOT_STRIDE), mask=token < num_tokens, other=-1)
    slot = tl.load(slots_ptr + offset_of(token, SLOT_STRIDE), mask=token < num_tokens, other=-1)
    ok = (source_slot >= 0) & (source_slot < num_source_slots) & (slot >= 0) & (slot < num_slots)
    data, scales = entry_offsets(source_slot, SOURCE_LAYOUT, SOURCE_PAGE_STRIDE, SOURCE_PAGE_SIZE)
    value, tail = load_entries(source_ptr, data, scales, ok, tl.float32, SOURCE_LAYOUT)
    store_entries(cache_ptr, slot, ok, value, tail, LAYOUT, PAGE_STRIDE, PAGE_SIZE, MIN_EXPONENT)


@triton.jit
def copy_mla_cache_kernel(
    source_ptr,  # [SOURCE_P, SOURCE_R, ROW]
    source_slots_ptr,  # [T] i32 | i64
    slots_ptr,  # [T] i32 | i64
    cache_ptr,  # [P, R, ROW], updated in place
    num_tokens,
    num_source_slots,
    num_slots,
    SOURCE_SLOT_STRIDE: tl.constexpr,
    SOURCE_PAGE_STRIDE: tl.constexpr,
    SOURCE_PAGE_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LANES: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [BLOCK_T]
    source_slot = tl.load(source_slots_ptr + offset_of(token, SOURCE_SLOT_STRIDE), mask=token < num_tokens, other=-1)
    slot = tl.load(slots_ptr + offset_of(token, SLOT_STRIDE), mask=token < num_tokens, other=-1)
    ok = ((source_slot >= 0) & (source_slot < num_source_slots) & (slot >= 0) & (slot < num_slots))[:, None]
    source_data, source_footer = entry_offsets(source_slot, LAYOUT, SOURCE_PAGE_STRIDE, SOURCE_PAGE_SIZE)
    data, footer = entry_offsets(slot, LAYOUT, PAGE_STRIDE, PAGE_SIZE)
    lane = tl.arange(0, LANES)[None, :]
    mask = ok & (lane < LAYOUT.data)
    tl.store(cache_ptr + data[:, None] + lane, tl.load(source_ptr + source_data[:, None] + lane, mask=mask), mask=mask)
    if LAYOUT.footer:
        offs_f = tl.arange(0, LAYOUT.footer)[None, :]
        scales = tl.load(source_ptr + source_footer[:, None] + offs_f, mask=ok)
        tl.store(cache_ptr + footer[:, None] + offs_f, scales, mask=ok)
