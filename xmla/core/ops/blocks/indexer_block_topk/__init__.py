from typing import Any

from xmla.core.call import Problem
from xmla.core.op import Op
from xmla.core.ops.blocks import indexer_block_logits
from xmla.core.ops.blocks.indexer_block_topk.cases import CASES
from xmla.core.ops.blocks.indexer_block_topk.gluon_sm90.plan import IMPLEMENTATION as GLUON_SM90
from xmla.core.ops.blocks.indexer_block_topk.gluon_sm90.plan import IN_BLOCKS
from xmla.core.ops.blocks.indexer_block_topk.plan import IMPLEMENTATION
from xmla.core.ops.blocks.indexer_block_topk.reference import reference
from xmla.core.ops.blocks.shared import block_selection_work
from xmla.core.ops.indexer.shared import check_selection
from xmla.core.ops.selection import select_topk


def indexer_block_topk(
    q8, weights, keys, key_scales, starts, ends, blocks, *, k: int, granularity: int, workspace_bytes: int = 1 << 29
) -> Any:
    """The k keys of each token with the largest logits among the keys of its selected blocks (prefill).

        logits[t,c] = logit of t and key starts[t] + n as in `indexer_logits`,  n = blocks[t, c div g] · g + c mod g
        logits[t,c] = −inf                          where there is no such block or starts[t] + n ≥ ends[t]
        columns     = select_topk(logits, k=k)                                                          g = granularity
        indices     = blocks[t, columns div g] · g + columns mod g,          columns without a key left out

    Everything else is as in `indexer_block_topk_paged`, whose blocks are a request's; here they count from the token's
    start. With few more keys N than the blocks have, neighbouring tokens read every key of their ranges once, and store
    the logits of their blocks' keys alone; with more each token reads its blocks' keys. Keys in no block do not
    influence the result.

    Args:
        q8, weights, keys, key_scales, starts, ends: As in `indexer_logits`.
        blocks: [T, BLOCKS] int32, blocks of g keys, counted from the token's start, as `indexer_blocks` gives them. A
            block outside [0, ⌈(ends[t] − starts[t]) / g⌉) names no key: −1 may stand anywhere. A block may stand twice.
        k, granularity: As in `indexer_block_topk_paged`.
        workspace_bytes: The most device memory to use besides the result: tokens are computed in parts that fit.

    Returns:
        indices: [T, K] int32, key − start in the order of their columns, so ascending if the blocks are, −1 padded at
            the end.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong; k < 1.
        UnsupportedError: I > 128; workspace_bytes is too small for one token at a time, or for 1024 parts.

    On 9.0 over fp8 keys N may be twice the keys of a token's blocks, elsewhere as many as these. Either way a row
    has the same bits, whatever else is in the call. Bits may differ between arrays whose first addresses differ modulo
    16 bytes.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 3, 32)), xp.ones((1, 3)), scale=1.0)
        >>> keys, key_scales = q8[0], weights[0]  # three keys of ones
        >>> starts, ends = xp.asarray([0], dtype=xp.int32), xp.asarray([3], dtype=xp.int32)
        >>> blocks = xp.asarray([[1, -1]], dtype=xp.int32)  # key 2
        >>> ops.indexer_block_topk(
        ...     q8, weights, keys, key_scales, starts, ends, blocks, k=2, granularity=2
        ... ).tolist()
        [[2, -1]]
    """


def check(problem: Problem) -> None:
    indexer_block_logits.check_blocks(problem)
    check_selection(problem)


OP = Op(
    prototype=indexer_block_topk,
    tensors=indexer_block_logits.OP.tensors,
    outputs=select_topk.OP.outputs,
    check=check,
    limits=indexer_block_logits.limits,
    work=block_selection_work,
    implementations=(GLUON_SM90, IN_BLOCKS, IMPLEMENTATION),
    reference=reference,
    cases=CASES,
)
