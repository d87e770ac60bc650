import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of
from xmla.core.lang.scores import attention_target, key_range, load_lse


@triton.jit
def indexer_target_kernel(
    q_ptr,  # [T, H, L+E]
    rows_ptr,  # [N, L+E]
    lse_ptr,  # [T, H] f32
    indices_ptr,  # [T, K] i32
    ends_ptr,  # [T] i32 if COLUMNS.HAS_ENDS
    starts_ptr,  # [T] i32 if COLUMNS.HAS_STARTS
    first_token,
    num_keys,  # N
    num_columns,  # K
    target_ptr,  # [T − first_token, K] f32
    C: tl.constexpr,  # Target
):
    BLOCK_N: tl.constexpr = C.BLOCK_N
    # Neighbouring programs have the same queries.
    blocks = tl.cdiv(num_columns, BLOCK_N)
    row = tl.program_id(0) // blocks
    token = first_token + row.to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = key_range(starts_ptr, ends_ptr, token, num_keys, C.COLUMNS)
    inside = column < num_columns
    key = tl.load(indices_ptr + offset_of(token, C.COLUMNS.INDEX_STRIDE) + column, mask=inside, other=-1)
    ok = (key >= start) & (key < end)
    lse = load_lse(lse_ptr, token, C.ATTENTION)
    target = attention_target(q_ptr, rows_ptr, lse, token, key, ok, C.ATTENTION)
    tl.store(target_ptr + offset_of(row, num_columns) + column, target, mask=inside)
