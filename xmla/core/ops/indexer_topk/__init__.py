from typing import Any

from xmla.core.checks import Limit
from xmla.core.op import Op, Problem
from xmla.core.ops import indexer_logits
from xmla.core.ops.indexer_logits import check_keys
from xmla.core.ops.indexer_topk.cases import CASES
from xmla.core.ops.indexer_topk.plan import check_workspace, plan
from xmla.core.ops.indexer_topk.reference import reference
from xmla.core.spec import Spec


def indexer_topk(q8, weights, keys, key_scales, starts, ends, *, k: int, workspace_bytes: int = 1 << 29) -> Any:
    """The k best keys of each token by indexer logit, in bounded memory (prefill).

        indices = select_topk(indexer_logits(q8, weights, keys, key_scales, starts, ends), ends, starts, k=k)

    exactly, total order included. The logits of as many tokens as fit the workspace are stored at a time, of 64 at
    least or 2²¹ logits; where those do not fit, or there would be more than 1024 parts, each program keeps the
    candidates of its tokens, at most twice k, and the memory does not grow with T or N.

    Args:
        q8, weights, keys, key_scales, starts, ends: As `indexer_logits`.
        k: K ≥ 1, as `select_topk`; at most 8192 where no logits are stored.
        workspace_bytes: The most device memory to use besides the result.

    Returns:
        indices: [T, K] int32, key − start, ascending, −1 padded at the end.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; k < 1.
        UnsupportedError: I > 128; workspace_bytes too small for one program; k > 8192 where the logits do not fit.

    Bits may differ where an array starts on another address modulo 16 bytes.
    """


def check(problem: Problem) -> None:
    check_keys(problem)
    check_workspace(problem)


OP = Op(
    prototype=indexer_topk,
    tensors=indexer_logits.OP.tensors,
    outputs={"indices": lambda p: Spec((p["T"], p.attrs["k"]), "int32")},
    check=check,
    limits=lambda p, arrays: (Limit("starts", 0, p["N"]), Limit("ends", 0, p["N"])),
    plan=plan,
    reference=reference,
    cases=CASES,
)
