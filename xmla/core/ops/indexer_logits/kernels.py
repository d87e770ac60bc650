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
    GROUP: tl.constexpr,  # tokens a matrix product
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
    key_row = offs_n.to(tl.int64) * KEY_STRIDE
    keys = tl.load(keys_ptr + key_row[:, None] + offs_d[None, :], mask=wanted[:, None], other=0.0)  # [BLOCK_N, D]
    key_scales = tl.load(key_scales_ptr + offs_n, mask=wanted, other=0.0)  # [BLOCK_N]

    offs_g = tl.arange(0, GROUP)
    member = tl.arange(0, GROUP * BLOCK_I) // BLOCK_I  # of each row of q: its token within the group, its head
    head = tl.arange(0, GROUP * BLOCK_I) % BLOCK_I
    for i in tl.range(0, BLOCK_T, GROUP):
        row_token = first_token + i + member
        row_ok = (head < HEADS) & (row_token < num_tokens)
        q_row = row_token.to(tl.int64) * Q_STRIDE_T + head * Q_STRIDE_I
        q = tl.load(q8_ptr + q_row[:, None] + offs_d[None, :], mask=row_ok[:, None], other=0.0)
        weight_row = row_token.to(tl.int64) * WEIGHT_STRIDE + head
        weights = tl.load(weights_ptr + weight_row, mask=row_ok, other=0.0)
        scores = head_scores(keys, q, weights, key_scales, GROUP)  # [BLOCK_N, GROUP] f32
        token = first_token + i + offs_g
        token_ok = token < num_tokens
        row_start = tl.load(starts_ptr + token, mask=token_ok, other=0)
        row_end = tl.load(ends_ptr + token, mask=token_ok, other=0)
        in_range = (offs_n[:, None] >= row_start[None, :]) & (offs_n[:, None] < row_end[None, :])
        scores = tl.where(in_range, scores, float("-inf"))
        out = logits_ptr + token.to(tl.int64)[None, :] * num_keys + offs_n[:, None]
        tl.store(out, scores, mask=in_keys[:, None] & token_ok[None, :])
