import triton
import triton.language as tl

from xmla.core.lang.blocks import end_of_blocks, entries_of_columns
from xmla.core.lang.indexer import head_scores, load_keys, load_query
from xmla.core.lang.launches import let_next_start, wait_for_earlier
from xmla.core.lang.numbers import as_bytes
from xmla.core.lang.offsets import offset_of
from xmla.core.ops.selection.select_topk.kernels import row_range


@triton.jit
def indexer_block_logits_kernel(
    q8_ptr,  # [T, I, D] e4m3 | bf16
    weights_ptr,  # [T, I] f32
    keys_ptr,  # [N, D] e4m3 | [N, D/2] bytes
    key_scales_ptr,  # [N] f32 | i32
    starts_ptr,  # [T] i32
    ends_ptr,  # [T] i32
    blocks_ptr,  # [T, BLOCKS] i32
    first_row,  # of those of q8
    num_keys,
    blocks_stride,
    num_columns,  # BLOCKS · GRANULARITY
    splits,  # programs a token
    widths_ptr,  # [T] i32
    logits_ptr,  # [T, num_columns] f32
    C: tl.constexpr,  # BlockLogits
):
    QUERY: tl.constexpr = C.QUERY
    HEADS: tl.constexpr = QUERY.HEADS
    D: tl.constexpr = QUERY.D
    BLOCK_N: tl.constexpr = C.BLOCK_N
    let_next_start(C.OVERLAP_LIMIT)
    wait_for_earlier(C.OVERLAP_LIMIT)
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    token = first_row + row
    start, length = row_range(starts_ptr, ends_ptr, token, num_keys, True)
    blocks_row = blocks_ptr + offset_of(token, blocks_stride)
    if split == 0:
        tl.store(widths_ptr + token, end_of_blocks(blocks_row, num_columns, length, C.GRANULARITY))

    head = tl.arange(0, QUERY.BLOCK_I)
    q_ptrs = q8_ptr + offset_of(token, QUERY.Q_STRIDE_T) + offset_of(head[:, None], QUERY.Q_STRIDE_I, HEADS)
    q = load_query(q_ptrs + tl.arange(0, D)[None, :], (head < HEADS)[:, None])
    weights = tl.load(weights_ptr + offset_of(token, QUERY.WEIGHT_STRIDE) + head, mask=head < HEADS, other=0.0)
    out_row = logits_ptr + offset_of(row, num_columns)
    tiles = tl.cdiv(tl.cdiv(num_columns, BLOCK_N), splits)  # of a program
    first = split * tiles * BLOCK_N
    for tile in tl.range(0, tl.cdiv(tl.minimum(tiles * BLOCK_N, num_columns - first), BLOCK_N)):
        column = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        position, wanted = entries_of_columns(blocks_row, column, num_columns, length, C.GRANULARITY)
        out = out_row + column[:, None] + tl.arange(0, 1)[None, :]
        if tl.max(wanted.to(tl.int32)) > 0:
            key = start + position
            scale_ptrs = as_bytes(key_scales_ptr) + offset_of(key, 4)
            keys, factors = load_keys(keys_ptr, offset_of(key, C.KEY_STRIDE), scale_ptrs, wanted, D, C.KEYS.MXFP4)
            scores = head_scores(keys, q, weights, factors, 1, C.KEYS)  # [BLOCK_N, 1] f32
            tl.store(out, tl.where(wanted[:, None], scores, float("-inf")), mask=(column < num_columns)[:, None])
        else:
            tl.store(out, float("-inf"), mask=(column < num_columns)[:, None])
