from dataclasses import replace
from typing import Any

from xmla.core.call import paged_limits
from xmla.core.ops.blocks import indexer_blocks, select_blocks
from xmla.core.ops.blocks.indexer_blocks_paged.cases import CASES
from xmla.core.ops.blocks.indexer_blocks_paged.plan import plan
from xmla.core.ops.indexer import indexer_logits_paged
from xmla.core.ops.indexer.shared import selection_work
from xmla.core.plan import Implementation


def indexer_blocks_paged(
    q8, weights, cache, block_table, lengths, request_ids=None, *, k: int, granularity: int, newest: int = 1,
    workspace_bytes: int = 1 << 29, cache_format: str | None = None,
) -> Any:  # fmt: skip
    """The k blocks of each token's keys with the largest logits over the paged cache, in bounded memory (decode).

        logits   = indexer_logits_paged(q8, weights, cache, block_table, lengths, request_ids)
        block b  = keys b · granularity … (b+1) · granularity − 1, as far as there are
        value[b] = its largest logit; of the last `newest` blocks: above all others
        indices  = the first k blocks in the order value descending, then block ascending

    The result is exactly this. The logits are stored of all tokens if they fit the workspace, otherwise of as many
    tokens at a time as do.

    Args:
        q8, weights, cache, block_table, lengths, request_ids: As in `indexer_logits_paged`.
        k: K ≥ 1, any size.
        granularity: Keys of a block, a power of two up to 128. The last block may be incomplete.
        newest: Blocks at the end of a token's keys that are always selected, at most k.
        workspace_bytes: The most device memory to use besides the result.
        cache_format: As in `write_indexer_cache`.

    Returns:
        indices: [T, K] int32, blocks within the request, ascending, −1 padded at the end. Of a token whose request id
            is outside [0, B), and so has logits of −inf, the blocks that are taken of equal ones.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; T is not a multiple of B.
        UnsupportedError: I > 128; workspace_bytes is too small for one token at a time, or for 1024 parts.

    NaN is never a block's largest logit unless all its logits are NaN; such a block comes after all others. With
    newest > 0 an infinite logit counts as the largest finite one. A token's n largest logits lie in its n blocks with
    the largest logits. So n keys selected within at least n + newest blocks are those selected of all keys.

    Granularity as NVIDIA's cuDNN front-end names it. DeepSeek-V4.1's source layer keeps 2048 blocks of 8. It and the
    layers after it then select keys in them by `indexer_block_topk_paged`, which for the source layer is the selection
    over all keys.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 2, 32)), xp.ones((1, 2)))
        >>> cache = xp.zeros((2, 4, 36), dtype=xp.uint8)  # equal keys: the first block wins, and the newest
        >>> block_table, lengths = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([5], dtype=xp.int32)
        >>> ops.indexer_blocks_paged(q8, weights, cache, block_table, lengths, k=2, granularity=2).tolist()
        [[0, 2]]
    """


OP = replace(
    indexer_blocks.OP,
    prototype=indexer_blocks_paged,
    tensors=indexer_logits_paged.OP.tensors,
    limits=paged_limits,
    work=selection_work,
    steps=(indexer_logits_paged.OP, select_blocks.OP),
    implementations=(Implementation("steps", plan),),
    cases=CASES,
)
