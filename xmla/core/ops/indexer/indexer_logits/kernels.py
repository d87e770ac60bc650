import triton
import triton.language as tl

from xmla.core.lang.indexer import head_scores, heads_of_tile, load_keys, load_query
from xmla.core.lang.numbers import as_bytes
from xmla.core.lang.offsets import offset_of


@triton.jit
def indexer_logits_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3 | [N, D/2] bytes
    key_scales_ptr,  # [N] f32 | i32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    first_row,  # of num_tokens tokens
    num_tokens,
    num_keys,
    logits_ptr,  # [num_tokens, N] f32
    C: tl.constexpr,  # Logits
):
    QUERY: tl.constexpr = C.QUERY
    HEADS: tl.constexpr = QUERY.HEADS
    D: tl.constexpr = QUERY.D
    BLOCK_I: tl.constexpr = QUERY.BLOCK_I
    BLOCK_T: tl.constexpr = C.BLOCK_T
    GROUP: tl.constexpr = C.GROUP
    BLOCK_N: tl.constexpr = C.BLOCK_N
    q8_ptr += offset_of(first_row, QUERY.Q_STRIDE_T)
    weights_ptr += offset_of(first_row, QUERY.WEIGHT_STRIDE)
    starts_ptr += first_row
    ends_ptr += first_row
    # Neighbouring programs have the same queries and consecutive keys.
    key_blocks = tl.cdiv(num_keys, BLOCK_N)
    first_token = tl.program_id(0) // key_blocks * BLOCK_T
    first_key = tl.program_id(0) % key_blocks * BLOCK_N
    offs_n = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_t = first_token + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    in_keys = offs_n < num_keys
    start = tl.load(starts_ptr + offs_t, mask=offs_t < num_tokens, other=0x7FFFFFFF)
    end = tl.load(ends_ptr + offs_t, mask=offs_t < num_tokens, other=0)

    if (tl.min(start) >= first_key + BLOCK_N) | (tl.max(end) <= first_key):  # none of these keys is in a row's range
        nothing = tl.full([BLOCK_T, BLOCK_N], float("-inf"), tl.float32)
        out = logits_ptr + offset_of(offs_t[:, None], num_keys) + offs_n[None, :]
        tl.store(out, nothing, mask=(offs_t < num_tokens)[:, None] & in_keys[None, :])
    else:
        # Keys outside every row's range are not read.
        wanted = in_keys & (offs_n >= tl.min(start)) & (offs_n < tl.max(end))
        key_row = offset_of(offs_n, C.KEY_STRIDE)
        scale_ptrs = as_bytes(key_scales_ptr) + offset_of(offs_n, 4)
        keys, factors = load_keys(keys_ptr, key_row, scale_ptrs, wanted, D, C.KEYS.FORMAT)
        offs_d = tl.arange(0, D)
        offs_g = tl.arange(0, GROUP)
        member, head = heads_of_tile(GROUP, BLOCK_I, C.KEYS.RUN)  # of each row of q
        every_row_wants_all = (tl.max(start) <= first_key) & (tl.min(end) >= first_key + BLOCK_N)
        for i in tl.range(0, BLOCK_T, GROUP):
            # Rows past the last token repeat it: cheaper than a mask, and they are not stored.
            row_token = tl.minimum(first_token + i + member, num_tokens - 1).to(tl.int64)
            q_row = offset_of(row_token, QUERY.Q_STRIDE_T) + offset_of(head, QUERY.Q_STRIDE_I, HEADS)
            q_ptrs = q8_ptr + q_row[:, None] + offs_d[None, :]
            weight_ptrs = weights_ptr + offset_of(row_token, QUERY.WEIGHT_STRIDE) + head
            if HEADS < BLOCK_I:
                q = load_query(q_ptrs, (head < HEADS)[:, None])
                weights = tl.load(weight_ptrs, mask=head < HEADS, other=0.0)
            else:
                q = load_query(q_ptrs, None)
                weights = tl.load(weight_ptrs)
            scores = head_scores(keys, q, weights, factors, GROUP, C.KEYS)  # [BLOCK_N, GROUP] f32
            token = first_token + i + offs_g
            token_ok = token < num_tokens
            # The product is outside this branch: ptxas 12.8 confuses the operands of wgmma in two branches.
            if not every_row_wants_all:
                row_start = tl.load(starts_ptr + token, mask=token_ok, other=0)
                row_end = tl.load(ends_ptr + token, mask=token_ok, other=0)
                in_range = (offs_n[:, None] >= row_start[None, :]) & (offs_n[:, None] < row_end[None, :])
                scores = tl.where(in_range, scores, float("-inf"))
            out = logits_ptr + offset_of(token[None, :], num_keys) + offs_n[:, None]
            tl.store(out, scores, mask=in_keys[:, None] & token_ok[None, :])
