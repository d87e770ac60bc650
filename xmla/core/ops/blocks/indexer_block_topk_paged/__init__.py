from dataclasses import replace
from typing import Any

from xmla.core.ops.blocks import indexer_block_logits_paged, indexer_block_topk
from xmla.core.ops.blocks.indexer_block_topk.gluon_sm90.plan import IN_BLOCKS as GLUON_SM90
from xmla.core.ops.blocks.indexer_block_topk.plan import IMPLEMENTATION
from xmla.core.ops.blocks.indexer_block_topk_paged.cases import CASES


def indexer_block_topk_paged(
    q8, weights, cache, block_table, lengths, blocks, request_ids=None, *, k: int, granularity: int,
    workspace_bytes: int = 1 << 29, cache_format: str | None = None,
) -> Any:  # fmt: skip
    """The k keys of each token with the largest logits among the keys of its selected blocks, over the paged cache.

        logits[t,c] = logit of t and key n as in `indexer_logits_paged`,      n = blocks[t, c div g] · g + c mod g
        logits[t,c] = −inf                                               where there is no such block or n ≥ lengths[t]
        columns     = select_topk(logits, k=k)                                                          g = granularity
        indices     = blocks[t, columns div g] · g + columns mod g,          columns without a key left out

    With blocks in ascending order the result is exactly the first k of the blocks' keys in `select_topk`'s total order;
    in another order of blocks the keys have the order of their columns. In blocks that `indexer_blocks_paged` selected
    for the same query, at least k + newest of them, the selection is that of `indexer_topk_paged` over all keys.

    Args:
        q8, weights, cache, block_table, lengths, request_ids: As in `indexer_logits_paged`. Only page ids that a
            block's keys below the length refer to are read.
        blocks: [T, BLOCKS] int32, blocks of g keys within the request, as `indexer_blocks_paged` gives them. A block
            outside [0, ⌈lengths[t] / g⌉) names no key: −1 may stand anywhere. A block may stand twice.
        k: K ≥ 1, as in `select_topk`.
        granularity: Keys of a block, a power of two up to 128.
        workspace_bytes: The most device memory to use besides the result: tokens are computed in parts that fit.
        cache_format: As in `write_indexer_cache`.

    Returns:
        indices: [T, K] int32, positions within the request in the order of their columns, so ascending if the blocks
            are, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B; k < 1.
        UnsupportedError: I > 128; workspace_bytes is too small for one token at a time, or for 1024 parts.

    DeepSeek-V4.1's index layers after the source select 512 keys of 2048 blocks of 8, whatever the context.
    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 2, 32)), xp.ones((1, 2)))
        >>> cache = xp.zeros((2, 4, 36), dtype=xp.uint8)  # equal keys: the first ones win
        >>> block_table, lengths = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([5], dtype=xp.int32)
        >>> blocks = xp.asarray([[1, 2]], dtype=xp.int32)  # keys 2 and 3, and key 4
        >>> ops.indexer_block_topk_paged(
        ...     q8, weights, cache, block_table, lengths, blocks, k=2, granularity=2
        ... ).tolist()
        [[2, 3]]
    """


OP = replace(
    indexer_block_topk.OP,
    prototype=indexer_block_topk_paged,
    tensors=indexer_block_logits_paged.OP.tensors,
    implementations=(GLUON_SM90, IMPLEMENTATION),
    cases=CASES,
)
