import triton
import triton.language as tl

from xmla.core.lang import head_scores


@triton.jit(do_not_specialize=["num_tokens", "num_keys"])
def indexer_logits_kernel(
    q8_ptr,  # [T, I, D] e4m3
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3
    key_scales_ptr,  # [N] f32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    num_tokens,
    num_keys,
    logits_ptr,  # [T, N] f32
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_I: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    # Neighbouring programs share their queries and walk over the keys.
    key_blocks = tl.cdiv(num_keys, BLOCK_N)
    first_token = tl.program_id(0) // key_blocks * BLOCK_T
    first_key = tl.program_id(0) % key_blocks * BLOCK_N
    offs_n = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    in_keys = offs_n < num_keys

    # The part of the tile that any row wants; other keys are not read.
    offs_t = first_token + tl.arange(0, BLOCK_T)
    start = tl.load(starts_ptr + offs_t, mask=offs_t < num_tokens, other=0x7FFFFFFF)
    end = tl.load(ends_ptr + offs_t, mask=offs_t < num_tokens, other=0)
    wanted = in_keys & (offs_n >= tl.min(start)) & (offs_n < tl.max(end))

    offs_d = tl.arange(0, D)
    offs_i = tl.arange(0, BLOCK_I)
    head_ok = offs_i < HEADS
    key_row = offs_n.to(tl.int64) * KEY_STRIDE
    keys = tl.load(keys_ptr + key_row[:, None] + offs_d[None, :], mask=wanted[:, None], other=0.0)  # [BLOCK_N, D]
    key_scales = tl.load(key_scales_ptr + offs_n, mask=wanted, other=0.0)  # [BLOCK_N]

    for i in tl.range(0, tl.minimum(BLOCK_T, num_tokens - first_token)):
        token = first_token + i
        q_row = q8_ptr + token.to(tl.int64) * Q_STRIDE_T
        q = tl.load(q_row + offs_i[:, None] * Q_STRIDE_I + offs_d[None, :], mask=head_ok[:, None], other=0.0)
        weights = tl.load(weights_ptr + token.to(tl.int64) * WEIGHT_STRIDE + offs_i, mask=head_ok, other=0.0)
        scores = head_scores(keys, q, weights, key_scales)  # [BLOCK_N] f32
        row_start = tl.load(starts_ptr + token)
        row_end = tl.load(ends_ptr + token)
        scores = tl.where((offs_n >= row_start) & (offs_n < row_end), scores, float("-inf"))
        tl.store(logits_ptr + token.to(tl.int64) * num_keys + offs_n, scores, mask=in_keys)
