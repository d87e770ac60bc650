import triton
import triton.language as tl

from xmla.core.lang import as_bytes, as_floats, page_base, quantize


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write_mla_cache_kernel(
    latent_ptr,  # [T, L]
    rope_ptr,  # [T, E]
    slots_ptr,  # [T] i32 | i64
    cache_ptr,  # [P, R, ROW] bytes, updated in place
    num_tokens,
    num_slots,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    TILES: tl.constexpr = LATENT // TILE
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    slot = tl.load(slots_ptr + token.to(tl.int64) * SLOT_STRIDE, mask=token < num_tokens, other=-1)
    ok = (slot >= 0) & (slot < num_slots)
    row = page_base(slot // PAGE_SIZE, PAGE_STRIDE) + (slot % PAGE_SIZE) * ROW  # [BLOCK_T] bytes
    cache = as_bytes(cache_ptr)

    offs_g = tl.arange(0, TILES)[None, :, None]
    offs_l = offs_g * TILE + tl.arange(0, TILE)[None, None, :]  # [1, TILES, TILE]
    latent_row = token.to(tl.int64) * LATENT_STRIDE
    x = tl.load(latent_ptr + latent_row[:, None, None] + offs_l, mask=ok[:, None, None], other=0.0).to(tl.float32)
    values, scales = quantize(x, 2, MIN_EXPONENT)  # [BLOCK_T, TILES, TILE] e4m3, [BLOCK_T, TILES] f32
    tl.store(cache + row[:, None, None] + offs_l, values.to(tl.uint8, bitcast=True), mask=ok[:, None, None])
    scale_ptrs = as_floats(cache + row[:, None] + SCALE_OFFSET + 4 * tl.arange(0, TILES)[None, :])
    tl.store(scale_ptrs, scales, mask=ok[:, None])

    offs_e = tl.arange(0, ROPE)[None, :]
    rope_row = token.to(tl.int64) * ROPE_STRIDE
    rope = tl.load(rope_ptr + rope_row[:, None] + offs_e, mask=ok[:, None], other=0.0).to(tl.bfloat16)
    rope_ptrs = (cache + row[:, None] + ROPE_OFFSET).to(tl.pointer_type(tl.bfloat16), bitcast=True) + offs_e
    tl.store(rope_ptrs, rope, mask=ok[:, None])
