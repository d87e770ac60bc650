from typing import Any

from xmla.core.call import Problem
from xmla.core.op import Op
from xmla.core.ops.blocks import select_blocks
from xmla.core.ops.blocks.indexer_blocks.cases import CASES
from xmla.core.ops.blocks.indexer_blocks.plan import plan
from xmla.core.ops.blocks.indexer_blocks.reference import reference
from xmla.core.ops.blocks.shared import check_newest
from xmla.core.ops.indexer import indexer_logits
from xmla.core.ops.indexer.shared import check_keys, check_selection, selection_work
from xmla.core.plan import Implementation


def indexer_blocks(
    q8, weights, keys, key_scales, starts, ends, *, k: int, granularity: int, newest: int = 1,
    workspace_bytes: int = 1 << 29,
) -> Any:  # fmt: skip
    """The k blocks of each token's keys with the largest indexer logits, in bounded memory (prefill).

        logits  = indexer_logits(q8, weights, keys, key_scales, starts, ends)
        block b = keys start + b · granularity … start + (b+1) · granularity − 1, as far as they are in the range
        indices = the first k blocks in the order of `indexer_blocks_paged`

    The result is exactly this. The plan stores the logits of as many tokens at a time as fit the workspace, on 9.0 over
    fp8 keys the largest one of each block alone.

    Args:
        q8, weights, keys, key_scales, starts, ends: As in `indexer_logits`.
        k, granularity, newest: As in `indexer_blocks_paged`.
        workspace_bytes: The most device memory to use besides the result.

    Returns:
        indices: [T, K] int32, blocks counted from the token's start, ascending, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis, stride or attribute is wrong.
        UnsupportedError: I > 128; workspace_bytes is too small for the tokens of one program, or for 1024 parts.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 3, 32)), xp.ones((1, 3)), scale=1.0)
        >>> keys, key_scales = q8[0], weights[0]  # three equal keys: the first block wins, and the newest
        >>> starts, ends = xp.asarray([0], dtype=xp.int32), xp.asarray([3], dtype=xp.int32)
        >>> ops.indexer_blocks(
        ...     q8, weights, keys, key_scales, starts, ends, k=2, granularity=1
        ... ).tolist()
        [[0, 2]]
    """


def check(problem: Problem) -> None:
    check_keys(problem)
    check_newest(problem)
    check_selection(problem)


OP = Op(
    prototype=indexer_blocks,
    tensors=indexer_logits.OP.tensors,
    outputs=select_blocks.OP.outputs,
    check=check,
    work=selection_work,
    steps=(indexer_logits.OP, select_blocks.OP),
    implementations=(Implementation("steps", plan),),
    reference=reference,
    cases=CASES,
)
