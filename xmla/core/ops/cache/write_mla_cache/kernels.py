import triton
import triton.language as tl

from xmla.core.lang.entries import LANES, TAIL_LANES, store_entries
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import load_slot


@triton.jit
def write_entries(program, latent_ptr, rope_ptr, slots_ptr, cache_ptr, num_tokens, num_slots, C: tl.constexpr):
    """Quantise and insert the entries of C.BLOCK_T tokens."""
    LAYOUT: tl.constexpr = C.LAYOUT
    BLOCK_T: tl.constexpr = C.BLOCK_T
    token = (program * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [BLOCK_T]
    slot, ok = load_slot(slots_ptr, token, token < num_tokens, num_slots, C.SLOT_STRIDE)
    offs_l = tl.arange(0, LANES)[None, :]
    latent_ptrs = latent_ptr + offset_of(token[:, None], C.LATENT_STRIDE) + offs_l
    value = tl.load(latent_ptrs, mask=ok[:, None] & (offs_l < LAYOUT.latent), other=0.0).to(tl.float32)
    rope_row = rope_ptr + offset_of(token[:, None], C.ROPE_STRIDE)
    if LAYOUT.rope_in_value:
        is_rope = offs_l >= LAYOUT.latent
        rope = tl.load(rope_row + (offs_l - LAYOUT.latent), mask=ok[:, None] & is_rope, other=0.0).to(tl.float32)
        value = tl.where(is_rope, rope, value)
    offs_e = tl.arange(0, TAIL_LANES)[None, :]
    tail = tl.load(rope_row + offs_e, mask=ok[:, None] & (offs_e < LAYOUT.tail), other=0.0).to(tl.float32)
    store_entries(cache_ptr, slot, ok, value, tail, LAYOUT, C.PAGE_STRIDE, C.PAGE_SIZE, C.MIN_EXPONENT)


@triton.jit
def write_mla_cache_kernel(
    latent_ptr,  # [T, L]
    rope_ptr,  # [T, E]
    slots_ptr,  # [T] i32 | i64
    cache_ptr,  # [P, R, ROW], updated in place
    num_tokens,
    num_slots,
    C: tl.constexpr,  # Entries
):
    write_entries(tl.program_id(0), latent_ptr, rope_ptr, slots_ptr, cache_ptr, num_tokens, num_slots, C)
