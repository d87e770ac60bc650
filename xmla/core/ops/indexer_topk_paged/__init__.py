from typing import Any

from xmla.core.checks import paged_limits
from xmla.core.op import Op, Problem
from xmla.core.ops import indexer_logits_paged
from xmla.core.ops.indexer_logits_paged import check_paged_cache, check_requests
from xmla.core.ops.indexer_topk.plan import check_workspace
from xmla.core.ops.indexer_topk_paged.cases import CASES
from xmla.core.ops.indexer_topk_paged.plan import plan
from xmla.core.ops.indexer_topk_paged.reference import reference
from xmla.core.spec import Spec


def indexer_topk_paged(
    q8, weights, cache, block_table, lengths, request_ids=None, *, k: int, workspace_bytes: int = 1 << 29
) -> Any:
    """The k best keys of each token by indexer logit over the paged indexer cache, in bounded memory (decode).

        indices = select_topk(indexer_logits_paged(q8, weights, cache, block_table, lengths, request_ids), lengths, k=k)

    exactly, total order included. The logits are stored only where [T, M · R] of them fit the workspace.

    Args:
        q8, weights, cache, block_table, lengths, request_ids: As `indexer_logits_paged`.
        k: K ≥ 1, as `select_topk`; at most 8192 where the logits do not fit.
        workspace_bytes: The most device memory to use besides the result.

    Returns:
        indices: [T, K] int32, positions within the request, ascending, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; T is not a multiple of B; k < 1.
        UnsupportedError: I > 128; workspace_bytes too small for a program a group of tokens; k > 8192 where the logits
            do not fit.

    Bits may differ where an array starts on another address modulo 16 bytes.
    """


def check(problem: Problem) -> None:
    check_paged_cache(problem)
    check_requests(problem, "q8")
    check_workspace(problem)


OP = Op(
    prototype=indexer_topk_paged,
    tensors=indexer_logits_paged.OP.tensors,
    outputs={"indices": lambda p: Spec((p["T"], p.attrs["k"]), "int32")},
    check=check,
    limits=paged_limits,
    plan=plan,
    reference=reference,
    cases=CASES,
)
