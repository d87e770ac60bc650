import triton
import triton.language as tl

from xmla.core.lang.entries import LANES, TAIL_LANES, entry_offsets, load_entries
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import load_slot


@triton.jit
def read_mla_cache_kernel(
    cache_ptr,  # [P, R, ROW]
    slots_ptr,  # [T] i32 | i64
    num_tokens,
    num_slots,
    rows_ptr,  # [T, L+E]
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [BLOCK_T]
    slot, ok = load_slot(slots_ptr, token, token < num_tokens, num_slots, SLOT_STRIDE)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    data, scales = entry_offsets(slot, LAYOUT, PAGE_STRIDE, PAGE_SIZE)
    value, tail = load_entries(cache_ptr, data, scales, ok, dtype, LAYOUT)
    row = rows_ptr + offset_of(token[:, None], LAYOUT.dims)
    stored = (token < num_tokens)[:, None]
    tl.store(row + tl.arange(0, LANES)[None, :], value, mask=stored)
    if LAYOUT.tail:
        tl.store(row + LANES + tl.arange(0, TAIL_LANES)[None, :], tail, mask=stored)
