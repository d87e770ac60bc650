import triton
import triton.language as tl

from xmla.core.lang.indexer import store_keys
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.slots import load_slot


@triton.jit
def write_keys(program, keys_ptr, slots_ptr, cache_ptr, num_tokens, num_slots, C: tl.constexpr):
    """Quantise and insert the keys of C.BLOCK_T tokens."""
    BLOCK_T: tl.constexpr = C.BLOCK_T
    D: tl.constexpr = C.D
    token = program * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    slot, ok = load_slot(slots_ptr, token, token < num_tokens, num_slots, C.SLOT_STRIDE)
    offs_d = tl.arange(0, D)[None, :]
    x = tl.load(keys_ptr + offset_of(token[:, None], C.KEY_STRIDE) + offs_d, mask=ok[:, None], other=0.0)
    store_keys(cache_ptr, slot, ok, x.to(tl.float32), C.FORMAT, C.PAGE_STRIDE, C.PAGE_SIZE, C.MIN_EXPONENT)


@triton.jit
def write_indexer_cache_kernel(
    keys_ptr,  # [T, D]
    slots_ptr,  # [T] i32 | i64
    cache_ptr,  # P pages of R rows of values and R times 4 bytes of scales, updated in place
    num_tokens,
    num_slots,
    C: tl.constexpr,  # CachedKeys
):
    write_keys(tl.program_id(0), keys_ptr, slots_ptr, cache_ptr, num_tokens, num_slots, C)
