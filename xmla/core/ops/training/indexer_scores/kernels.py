import triton
import triton.language as tl

from xmla.core.lang.indexer import head_scores, heads_of_tile
from xmla.core.lang.offsets import offset_of
from xmla.core.lang.scores import key_range, load_query, score


@triton.jit
def ranges_of(starts_ptr, ends_ptr, first_token, row, num_rows, num_keys, COLUMNS: tl.constexpr):
    """The first key that the token of each row may see, and one past the last; past the last row its own."""
    token = first_token + tl.minimum(row, num_rows - 1)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, COLUMNS)
    return start + tl.zeros(row.shape, tl.int32), end + tl.zeros(row.shape, tl.int32)


@triton.jit
def indexer_scores_kernel(
    q_ptr,  # [T, I, D]
    k_ptr,  # [N, D]
    weights_ptr,  # [T, I] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    first_token,
    num_rows,  # tokens from first_token on
    num_keys,  # N
    scores_ptr,  # [num_rows, N] f32
    C: tl.constexpr,  # Scores
):
    """Scores over ranges: a program has a tile of keys and BLOCK_T tokens, GROUP of them in a product."""
    INDEXER: tl.constexpr = C.INDEXER
    HEADS: tl.constexpr = INDEXER.HEADS
    BLOCK_T: tl.constexpr = C.BLOCK_T
    GROUP: tl.constexpr = C.GROUP
    BLOCK_N: tl.constexpr = C.BLOCK_N
    # Neighbouring programs have the same queries and consecutive keys.
    blocks = tl.cdiv(num_keys, BLOCK_N)
    first_row = tl.program_id(0) // blocks * BLOCK_T
    first_key = tl.program_id(0) % blocks * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)
    inside = key < num_keys
    row = first_row + tl.arange(0, BLOCK_T)
    start, end = ranges_of(starts_ptr, ends_ptr, first_token, row, num_rows, num_keys, C.COLUMNS)
    if (tl.min(start, 0) >= first_key + BLOCK_N) | (tl.max(end, 0) <= first_key):  # no token may see any of these keys
        nothing = tl.full([BLOCK_T, BLOCK_N], float("-inf"), tl.float32)
        out = scores_ptr + offset_of(row[:, None], num_keys) + key[None, :]
        tl.store(out, nothing, mask=(row < num_rows)[:, None] & inside[None, :])
    else:
        all_see_all = (tl.max(start, 0) <= first_key) & (tl.min(end, 0) >= first_key + BLOCK_N)
        seen = inside
        if not all_see_all:  # keys between the ranges of two tokens are not read
            by_token = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
            seen = tl.max(by_token.to(tl.int8), 0).to(tl.int1)
        offs_d = tl.arange(0, INDEXER.D)
        k_ptrs = k_ptr + offset_of(key[:, None], INDEXER.K_STRIDE) + offs_d[None, :]
        keys = tl.load(k_ptrs, mask=seen[:, None], other=0.0)
        factors = tl.full([BLOCK_N], 1.0, tl.float32)
        member, head = heads_of_tile(GROUP, INDEXER.BLOCK_I, C.KEYS.RUN)  # of each row of q
        for first in tl.range(0, BLOCK_T, GROUP):
            row_token = first_token + tl.minimum(first_row + first + member, num_rows - 1).to(tl.int64)
            q_row = offset_of(row_token, INDEXER.Q_STRIDE_T) + offset_of(head, INDEXER.Q_STRIDE_I, HEADS)
            q_ptrs = q_ptr + q_row[:, None] + offs_d[None, :]
            weight_ptrs = weights_ptr + offset_of(row_token, INDEXER.WEIGHT_STRIDE) + head
            if HEADS < INDEXER.BLOCK_I:
                q = tl.load(q_ptrs, mask=(head < HEADS)[:, None], other=0.0)
                weights = tl.load(weight_ptrs, mask=head < HEADS, other=0.0)
            else:
                q = tl.load(q_ptrs)
                weights = tl.load(weight_ptrs)
            scores = head_scores(keys, q, weights, factors, GROUP, C.KEYS)  # [BLOCK_N, GROUP] f32
            of_group = first_row + first + tl.arange(0, GROUP)
            # The product is outside this branch: ptxas 12.8 confuses the operands of wgmma in two branches.
            if not all_see_all:
                own_start, own_end = ranges_of(
                    starts_ptr, ends_ptr, first_token, of_group, num_rows, num_keys, C.COLUMNS
                )
                ok = (key[:, None] >= own_start[None, :]) & (key[:, None] < own_end[None, :])
                scores = tl.where(ok, scores, float("-inf"))
            out = scores_ptr + offset_of(of_group[None, :], num_keys) + key[:, None]
            tl.store(out, scores, mask=inside[:, None] & (of_group < num_rows)[None, :])


@triton.jit
def selected_scores_kernel(
    q_ptr,  # [T, I, D]
    k_ptr,  # [N, D]
    weights_ptr,  # [T, I] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32
    num_keys,  # N
    num_columns,  # K
    scores_ptr,  # [T, K] f32
    C: tl.constexpr,  # Products
):
    """Scores at indices: a program has a token and a tile of its columns."""
    BLOCK_N: tl.constexpr = C.BLOCK_N
    # Neighbouring programs have the same queries.
    blocks = tl.cdiv(num_columns, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, C.COLUMNS)
    inside = column < num_columns
    key = tl.load(indices_ptr + offset_of(token, C.COLUMNS.INDEX_STRIDE) + column, mask=inside, other=-1)
    ok = inside & (key >= start) & (key < end)
    q, weights = load_query(q_ptr, weights_ptr, token, C.INDEXER)
    _, _, scores = score(q, k_ptr, weights, key, ok, C.INDEXER.K_STRIDE)
    scores = tl.where(ok, scores, float("-inf"))
    tl.store(scores_ptr + offset_of(token, num_columns) + column, scores, mask=inside)
