from typing import Any

from xmla.core.call import Problem
from xmla.core.op import Op
from xmla.core.ops.indexer import indexer_logits
from xmla.core.ops.indexer.indexer_topk.cases import CASES
from xmla.core.ops.indexer.indexer_topk.plan import plan
from xmla.core.ops.indexer.indexer_topk.reference import reference
from xmla.core.ops.indexer.shared import check_keys, check_selection, topk_work
from xmla.core.ops.selection import select_topk
from xmla.core.plan import Implementation


def indexer_topk(q8, weights, keys, key_scales, starts, ends, *, k: int, workspace_bytes: int = 1 << 29) -> Any:
    """The k keys of each token with the largest indexer logits, in bounded memory (prefill).

        indices = select_topk(indexer_logits(q8, weights, keys, key_scales, starts, ends), ends, starts, k=k)

    The result is exactly this, total order included. The plan stores the logits of as many tokens at a time as fit the
    workspace: at least 64 tokens or 2²¹ logits. If those do not fit, or there would be more than 1024 parts, no logits
    are stored. Each program then keeps the candidates of its tokens, at most 2 · k, and memory does not grow with T or
    N. If N ≤ k, every key is selected and there are no logits.

    Args:
        q8, weights, keys, key_scales, starts, ends: As in `indexer_logits`.
        k: K ≥ 1, as in `select_topk`; at most 8192 if no logits are stored.
        workspace_bytes: The most device memory to use besides the result.

    Returns:
        indices: [T, K] int32, key − start, ascending, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1.
        UnsupportedError: I > 128; workspace_bytes is too small for one program; k > 8192 and the logits do not fit.

    Bits may differ between arrays whose first addresses differ modulo 16 bytes.

    Example:
        >>> q8, weights = ops.quantize_indexer_query(xp.ones((1, 2, 32)), xp.ones((1, 2)))
        >>> keys, key_scales = q8[0], weights[0]  # two equal keys
        >>> starts, ends = xp.asarray([0], dtype=xp.int32), xp.asarray([2], dtype=xp.int32)
        >>> ops.indexer_topk(q8, weights, keys, key_scales, starts, ends, k=1).tolist()
        [[0]]
    """


def check(problem: Problem) -> None:
    check_keys(problem)
    check_selection(problem)


OP = Op(
    prototype=indexer_topk,
    tensors=indexer_logits.OP.tensors,
    outputs=select_topk.OP.outputs,
    check=check,
    work=topk_work,
    steps=(indexer_logits.OP, select_topk.OP),
    implementations=(Implementation("steps", plan, asked="steps"),),
    reference=reference,
    cases=CASES,
)
