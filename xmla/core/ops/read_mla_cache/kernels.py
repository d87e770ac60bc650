import triton
import triton.language as tl

from xmla.core.lang import as_bytes, as_floats, page_base


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def read_mla_cache_kernel(
    cache_ptr,  # [P, R, ROW] bytes
    slots_ptr,  # [T] i32 | i64
    num_tokens,
    num_slots,
    rows_ptr,  # [T, L+E]
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    TILES: tl.constexpr = LATENT // TILE
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    slot = tl.load(slots_ptr + token.to(tl.int64) * SLOT_STRIDE, mask=token < num_tokens, other=-1)
    ok = (slot >= 0) & (slot < num_slots)
    row = page_base(slot // PAGE_SIZE, PAGE_STRIDE) + (slot % PAGE_SIZE) * ROW  # [BLOCK_T] bytes
    cache = as_bytes(cache_ptr)
    out_row = rows_ptr + token.to(tl.int64) * (LATENT + ROPE)
    stored = token < num_tokens

    offs_g = tl.arange(0, TILES)[None, :]
    offs_l = offs_g[:, :, None] * TILE + tl.arange(0, TILE)[None, None, :]  # [1, TILES, TILE]
    raw = tl.load(cache + row[:, None, None] + offs_l, mask=ok[:, None, None], other=0)
    scales = tl.load(as_floats(cache + row[:, None] + SCALE_OFFSET + 4 * offs_g), mask=ok[:, None], other=0.0)
    latent = raw.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scales[:, :, None]  # [BLOCK_T, TILES, TILE]
    tl.store(out_row[:, None, None] + offs_l, latent.to(rows_ptr.dtype.element_ty), mask=stored[:, None, None])

    offs_e = tl.arange(0, ROPE)[None, :]
    rope_ptrs = (cache + row[:, None] + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16), bitcast=True) + offs_e
    rope = tl.load(rope_ptrs, mask=ok[:, None], other=0.0)
    tl.store(out_row[:, None] + LATENT + offs_e, rope.to(rows_ptr.dtype.element_ty), mask=stored[:, None])
