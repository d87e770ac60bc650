from dataclasses import replace
from typing import Any

from xmla.core.ops.blocks import indexer_block_logits
from xmla.core.ops.blocks.indexer_block_logits_paged.cases import CASES
from xmla.core.ops.blocks.shared import BLOCKS
from xmla.core.ops.indexer import indexer_logits_paged


def indexer_block_logits_paged(
    q8, weights, cache, block_table, lengths, blocks, request_ids=None, *, granularity: int,
    logits_dtype: str = "float32", cache_format: str | None = None,
) -> Any:  # fmt: skip
    """Lightning-indexer logits of the keys in each token's selected blocks alone, over the paged indexer cache.

        logits[t,c] = logit of t and key n as in `indexer_logits_paged`,      n = blocks[t, c div g] · g + c mod g
        logits[t,c] = −inf                                               where there is no such block or n ≥ lengths[t]
        widths[t]   = 1 + the last column c with a key, 0 if there is none                          g = granularity

    Time follows the blocks, not the context: keys in no block are never read.

    Args:
        q8, weights, cache, block_table, lengths, blocks, request_ids, granularity: As in `indexer_block_topk_paged`.
        logits_dtype: "float32", or "bfloat16" for float32 logits that are rounded when they are written: half of the
            memory and of its traffic, and logits that differ by less than 2**-7 of their size may tie.
        cache_format: As in `write_indexer_cache`.

    Returns:
        logits: [T, BLOCKS · g] in logits_dtype, every element written.
        widths: [T] int32: `select_topk` takes it as `ends`. With blocks in ascending order every column below it has a
            key.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B.
        UnsupportedError: I > 128.

    Numerics as in `indexer_logits`; on Hopper the bits are those of the logits over all keys.
    Bits may differ between arrays whose first addresses differ modulo 16 bytes.
    DeepGEMM's fp8_fp4_paged_sparse_mqa_logits is the same function.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 2, 32)), xp.ones((1, 2)))
        >>> cache = xp.zeros((2, 4, 36), dtype=xp.uint8)  # fp8 keys of 32 dims, all 0
        >>> block_table, lengths = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([5], dtype=xp.int32)
        >>> blocks = xp.asarray([[0, 2]], dtype=xp.int32)  # keys 0 and 1, and key 4
        >>> logits, widths = ops.indexer_block_logits_paged(
        ...     q8, weights, cache, block_table, lengths, blocks, granularity=2
        ... )
        >>> logits.tolist(), widths.tolist()
        ([[0.0, 0.0, 0.0, -inf]], [3])
    """


TENSORS = {name: tensor for name, tensor in indexer_logits_paged.OP.tensors.items() if name != "request_ids"}
TENSORS |= {"blocks": BLOCKS, "request_ids": indexer_logits_paged.OP.tensors["request_ids"]}

OP = replace(
    indexer_block_logits.OP,
    prototype=indexer_block_logits_paged,
    tensors=TENSORS,
    cases=CASES,
    instead="indexer_block_topk_paged",
)
