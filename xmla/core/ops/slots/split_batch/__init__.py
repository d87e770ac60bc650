from typing import Any

from xmla.core.call import INDEX, Limit, Problem, Result, Tensor
from xmla.core.op import Op
from xmla.core.ops.slots.split_batch.cases import CASES
from xmla.core.ops.slots.split_batch.plan import plan
from xmla.core.ops.slots.split_batch.reference import reference
from xmla.core.plan import Implementation


def split_batch(
    query_starts, lengths, has_context=None, *, num_tokens: int, decode_threshold: int = 1,
    require_uniform: bool = False,
) -> Any:  # fmt: skip
    """Split a batch into decodes and prefills, and find each token's request and visible keys, on the device.

        n[b]     = query_starts[b+1] − query_starts[b]                              new tokens of request b
        prefill  = n[b] > decode_threshold                                   the default: a short prefill is a decode
                   n[b] ≠ n[0]             if require_uniform, unless every n[b] is n[0] or 0: then all decode
                   or has_context[b] = 0   if given: a new request with a short prompt is a prefill
        split    = first b that is a prefill (0 if n[0] > decode_threshold); all after it are prefills

    Args:
        query_starts: [B+1] int32, the first token of each request and the end of the last, ascending from 0.
        lengths: [B] int32, keys of each request, its new tokens included; 0 for padding requests.
        has_context: [B] int32, 0 if the request has no keys besides those of its new tokens.
        num_tokens: T, all flat tokens, padding included.
        decode_threshold: The most new tokens that a decode has: 1 + speculative tokens.
        require_uniform: All decodes have the same number of new tokens; padding requests may have none.

    Returns:
        counts: [4] int32, the numbers of decodes, prefills, decode tokens, prefill tokens. Padding at the
            end counts as prefill tokens, or as decode tokens if there is no prefill.
        request_ids: [T] int32, the request of each token; −1 after the last request's tokens.
        token_lengths: [T] int32, max(0, lengths[b] − n[b] + 1 + j) for the j-th new token of b; 0 after the last
            request's tokens.

    Raises:
        ArgumentError: A dtype, rank or axis is wrong; num_tokens < 0; decode_threshold < 1.

    The policies are those of vLLM's split_decodes_and_prefills: treat_short_extends_as_decodes is on without
    has_context and off with it. With `request_ids` and `token_lengths` the paged ops serve requests with any numbers
    of new tokens in one call.

    Example:
        >>> query_starts = xp.asarray([0, 1, 4], dtype=xp.int32)
        >>> lengths = xp.asarray([9, 3], dtype=xp.int32)
        >>> counts, request_ids, token_lengths = ops.split_batch(query_starts, lengths, num_tokens=4)
        >>> counts.tolist(), request_ids.tolist(), token_lengths.tolist()
        ([1, 1, 1, 3], [0, 1, 1, 1], [9, 1, 2, 3])
    """


def check(problem: Problem) -> None:
    if problem["B+1"] != problem["B"] + 1:
        problem.refuse(
            "query_starts", "axis B+1 (axis 0)", problem["B+1"], f"{problem['B'] + 1}, one more than lengths"
        )
    problem.require_count("num_tokens", least=0)
    problem.require_count("decode_threshold")


OP = Op(
    prototype=split_batch,
    tensors={
        "query_starts": Tensor("B+1", INDEX),
        "lengths": Tensor("B", INDEX),
        "has_context": Tensor("B", INDEX),
    },
    outputs={
        "counts": Result("COUNTS", "int32", sizes={"COUNTS": lambda p: 4}),
        "request_ids": Result("NUM_TOKENS", "int32", sizes={"NUM_TOKENS": lambda p: p.attrs.num_tokens}),
        "token_lengths": Result("NUM_TOKENS", "int32", sizes={"NUM_TOKENS": lambda p: p.attrs.num_tokens}),
    },
    check=check,
    limits=lambda p, arrays: (
        Limit("query_starts", 0, p.attrs.num_tokens),
        Limit("lengths", 0, 2**31 - 1),
    ),
    implementations=(Implementation("triton", plan),),
    reference=reference,
    cases=CASES,
)
