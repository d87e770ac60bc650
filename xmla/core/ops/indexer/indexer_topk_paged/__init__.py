from dataclasses import replace
from typing import Any

from xmla.core.call import paged_limits
from xmla.core.ops.indexer import indexer_logits_paged, indexer_topk
from xmla.core.ops.indexer.indexer_topk_paged.cases import CASES
from xmla.core.ops.indexer.indexer_topk_paged.plan import plan
from xmla.core.ops.selection import select_topk
from xmla.core.plan import Implementation


def indexer_topk_paged(
    q8, weights, cache, block_table, lengths, request_ids=None, *, k: int, workspace_bytes: int = 1 << 29,
    cache_format: str | None = None,
) -> Any:  # fmt: skip
    """The k keys of each token with the largest logits over the paged indexer cache, in bounded memory (decode).

        indices = select_topk(indexer_logits_paged(q8, weights, cache, block_table, lengths, request_ids), lengths, k=k)

    The result is exactly this, total order included. The logits are stored only if [T, M · R] of them fit the
    workspace; if M · R ≤ k, every key is selected and there are none.

    Args:
        q8, weights, cache, block_table, lengths, request_ids: As in `indexer_logits_paged`.
        k: K ≥ 1, as in `select_topk`; at most 8192 if the logits do not fit.
        workspace_bytes: The most device memory to use besides the result.
        cache_format: As in `write_indexer_cache`.

    Returns:
        indices: [T, K] int32, positions within the request, ascending, −1 padded at the end. Of a token whose request
            id is outside [0, B), and so has logits of −inf, positions 0, 1, … below its length: `map_slots` gives −1.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; T is not a multiple of B; k < 1.
        UnsupportedError: I > 128; workspace_bytes is too small for one program per group of tokens; k > 8192 and the
            logits do not fit.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 2, 32)), xp.ones((1, 2)))
        >>> cache = xp.zeros((2, 4, 36), dtype=xp.uint8)  # equal keys: the first ones win
        >>> block_table, lengths = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([5], dtype=xp.int32)
        >>> ops.indexer_topk_paged(q8, weights, cache, block_table, lengths, k=2).tolist()
        [[0, 1]]
    """


OP = replace(
    indexer_topk.OP,
    prototype=indexer_topk_paged,
    tensors=indexer_logits_paged.OP.tensors,
    limits=paged_limits,
    steps=(indexer_logits_paged.OP, select_topk.OP),
    implementations=(Implementation("steps", plan, asked="steps"),),
    cases=CASES,
)
