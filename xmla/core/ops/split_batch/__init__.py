from typing import Any

from xmla.core.checks import Limit
from xmla.core.op import INDEX, Op, Problem, Tensor
from xmla.core.ops.split_batch.cases import CASES
from xmla.core.ops.split_batch.plan import plan
from xmla.core.ops.split_batch.reference import reference
from xmla.core.spec import Spec


def split_batch(
    query_starts, lengths, has_context=None, *, num_tokens: int, decode_threshold: int = 1,
    require_uniform: bool = False,
) -> Any:  # fmt: skip
    """Where decodes end and prefills begin in a batch, and the request and visible keys of each token; on the device.

        n[b]     = query_starts[b+1] − query_starts[b]                              new tokens of request b
        prefill  = n[b] > decode_threshold                                          the default: a short prefill decodes
                   n[b] ≠ n[0]             if require_uniform, unless every n[b] is n[0] or 0: then all decode
                   or has_context[b] = 0   if given: a new request with a short prompt is a prefill
        split    = first b that is a prefill (0 if n[0] > decode_threshold); all after it count as prefills

    Args:
        query_starts: [B+1] int32, the first token of each request and the end of the last, ascending from 0.
        lengths: [B] int32, keys of each request, its new tokens included; 0 for padding requests.
        has_context: [B] int32, 0 where a request has no keys yet but its new tokens.
        num_tokens: T, the flat tokens, padding included.
        decode_threshold: The most new tokens a decode has: 1 + speculative tokens.
        require_uniform: All decodes have the same number of new tokens; padding requests may have none.

    Returns:
        counts: [4] int32: decodes, prefills, decode tokens, prefill tokens.
        request_ids: [T] int32, the request of each token; −1 after the last request's.
        token_lengths: [T] int32, max(0, lengths[b] − n[b] + 1 + j) of the j-th new token of b; 0 after the last.

    Raises:
        ArgumentError: A dtype, rank or axis is wrong; num_tokens < 0; decode_threshold < 1.

    The policies are those of vLLM's split_decodes_and_prefills: treat_short_extends_as_decodes without has_context,
    its opposite with it. With `request_ids` and `token_lengths` the paged ops take any mixture of new tokens as it is.
    """


def check(problem: Problem) -> None:
    if problem["B+1"] != problem["B"] + 1:
        problem.refuse(
            "query_starts", "axis B+1 (axis 0)", problem["B+1"], f"{problem['B'] + 1}, one more than lengths"
        )
    if problem.attrs["num_tokens"] < 0:
        problem.refuse("num_tokens", "value", problem.attrs["num_tokens"], "at least 0")
    if problem.attrs["decode_threshold"] < 1:
        problem.refuse("decode_threshold", "value", problem.attrs["decode_threshold"], "at least 1")


OP = Op(
    prototype=split_batch,
    tensors={
        "query_starts": Tensor("B+1", INDEX),
        "lengths": Tensor("B", INDEX),
        "has_context": Tensor("B", INDEX),
    },
    outputs={
        "counts": lambda p: Spec((4,), "int32"),
        "request_ids": lambda p: Spec((p.attrs["num_tokens"],), "int32"),
        "token_lengths": lambda p: Spec((p.attrs["num_tokens"],), "int32"),
    },
    check=check,
    limits=lambda p, arrays: (
        Limit("query_starts", 0, p.attrs["num_tokens"]),
        Limit("lengths", 0, 2**31 - 1),
    ),
    plan=plan,
    reference=reference,
    cases=CASES,
)
