import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of
from xmla.core.lang.scores import key_range, load_query, score


@triton.jit
def indexer_scores_kernel(
    q_ptr,  # [T, I, D]
    k_ptr,  # [N, D]
    weights_ptr,  # [T, I] f32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    indices_ptr,  # [T, K] i32 if COLUMNS.HAS_INDICES
    num_keys,  # N
    num_columns,  # K or N
    scores_ptr,  # [T, COLUMNS] f32
    C: tl.constexpr,  # Scores
):
    BLOCK_N: tl.constexpr = C.BLOCK_N
    # Neighbouring programs have the same queries.
    blocks = tl.cdiv(num_columns, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, C.COLUMNS)
    inside = column < num_columns
    key = column
    if C.COLUMNS.HAS_INDICES:
        key = tl.load(indices_ptr + offset_of(token, C.COLUMNS.INDEX_STRIDE) + column, mask=inside, other=-1)
    ok = inside & (key >= start) & (key < end)
    q, weights = load_query(q_ptr, weights_ptr, token, C.INDEXER)
    _, _, scores = score(q, k_ptr, weights, key, ok, C.INDEXER.K_STRIDE)
    scores = tl.where(ok, scores, float("-inf"))
    tl.store(scores_ptr + offset_of(token, num_columns) + column, scores, mask=inside)
