import triton
import triton.language as tl


@triton.jit
def new_tokens(query_starts_ptr, request, inside, num_tokens):
    """First token and number of new tokens of each request; 0 for a request that does not exist."""
    first = tl.load(query_starts_ptr + request, mask=inside, other=0)
    end = tl.load(query_starts_ptr + request + 1, mask=inside, other=0)
    first = tl.minimum(tl.maximum(first, 0), num_tokens)
    end = tl.minimum(tl.maximum(end, 0), num_tokens)
    return first, tl.maximum(end - first, 0)


@triton.jit
def split_counts_kernel(
    query_starts_ptr,  # [B+1] i32
    has_context_ptr,  # [B] i32 if HAS_CONTEXT
    num_requests,
    num_tokens,
    counts_ptr,  # [4] i32
    HAS_CONTEXT: tl.constexpr,
    THRESHOLD: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    one = tl.arange(0, 1)
    _first, new_of_first = new_tokens(query_starts_ptr, one, one < num_requests, num_tokens)
    first_new = tl.sum(new_of_first)
    split = num_requests  # the first prefill
    uneven = 0  # requests whose new tokens differ from the first's, padding aside
    for base in tl.range(0, num_requests, BLOCK_B):
        request = base + tl.arange(0, BLOCK_B)
        inside = request < num_requests
        _starts, new = new_tokens(query_starts_ptr, request, inside, num_tokens)
        if UNIFORM:
            prefill = inside & (new != first_new)
            uneven += tl.sum((prefill & (new != 0)).to(tl.int32))
        else:
            prefill = inside & (new > THRESHOLD)
        if HAS_CONTEXT:
            prefill = prefill | (inside & (tl.load(has_context_ptr + request, mask=inside, other=1) == 0))
        split = tl.minimum(split, tl.min(tl.where(prefill, request, num_requests)))
    if UNIFORM:
        split = tl.where(uneven == 0, num_requests, split)
    split = tl.where(first_new > THRESHOLD, 0, split)
    decode_tokens = tl.load(query_starts_ptr + split)
    decode_tokens = tl.minimum(tl.maximum(decode_tokens, 0), num_tokens)
    decode_tokens = tl.where(split == num_requests, num_tokens, decode_tokens)
    tl.store(counts_ptr, split)
    tl.store(counts_ptr + 1, num_requests - split)
    tl.store(counts_ptr + 2, decode_tokens)
    tl.store(counts_ptr + 3, num_tokens - decode_tokens)


@triton.jit
def token_rows_kernel(
    query_starts_ptr,  # [B+1] i32
    lengths_ptr,  # [B] i32
    num_requests,
    num_tokens,
    request_ids_ptr,  # [T] i32
    token_lengths_ptr,  # [T] i32
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    request = tl.zeros([BLOCK_T], tl.int32)  # how many requests end at or before the token
    for base in tl.range(0, num_requests, BLOCK_B):
        other = base + tl.arange(0, BLOCK_B)
        end = tl.load(query_starts_ptr + other + 1, mask=other < num_requests, other=0x7FFFFFFF)
        end = tl.where(other < num_requests, tl.minimum(tl.maximum(end, 0), num_tokens), 0x7FFFFFFF)
        request += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), 1)
    inside = request < num_requests
    first, new = new_tokens(query_starts_ptr, request, inside, num_tokens)
    length = tl.load(lengths_ptr + request, mask=inside, other=0).to(tl.int64)
    visible = tl.minimum(length - new + 1 + token - first, length)
    tl.store(request_ids_ptr + token, tl.where(inside, request, -1), mask=token < num_tokens)
    tl.store(token_lengths_ptr + token, tl.maximum(visible, 0).to(tl.int32), mask=token < num_tokens)
