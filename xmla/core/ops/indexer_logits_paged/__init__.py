from typing import Any

from xmla.core.checks import paged_limits
from xmla.core.op import BYTES, F32, INDEX, Op, Problem, Tensor
from xmla.core.ops.indexer_logits import QUERY, check_query, check_query_dtype
from xmla.core.ops.indexer_logits_paged.cases import CASES
from xmla.core.ops.indexer_logits_paged.plan import columns, plan
from xmla.core.ops.indexer_logits_paged.reference import reference
from xmla.core.ops.write_indexer_cache import check_indexer_pages, check_indexer_row
from xmla.core.spec import Spec


def indexer_logits_paged(
    q8, weights, cache, block_table, lengths, request_ids=None, *, max_len: int | None = None
) -> Any:
    """Lightning-indexer logits of flat query tokens over the paged indexer cache (decode, any number of tokens each).

        logits[t,n] = Σ_i relu(q8[t,i] · key[n]) · weights[t,i]                      for n < lengths[t]
        key[n]: entry n % R of page block_table[request of t, n // R]

    Args:
        q8: [T, I, D] float8_e4m3fn, D of 32, 64 or 128, I ≤ 128; over MXFP4 keys also bfloat16. Tokens are flat rows, a
            request's tokens adjacent.
        weights: [T, I] float32, scales of q folded in.
        cache: [P, R, ROW] uint8, int8 or float8_e4m3fn, ROW of D+4 (fp8) or D/2+4 (mxfp4), scales in the page's footer
            (`write_indexer_cache`); any page size, pages start on multiples of 4 bytes.
        block_table: [B, M] int32, page ids. Entries past a token's length are never read. A key on a page outside
            [0, P) gets −inf, as does every key of a token whose request does not exist.
        lengths: [T] int32, keys visible to each token, clamped to [0, min(max_len, M · R)].
        request_ids: [T] int32, each token's row of block_table, any integer. Without it T is a multiple of B and every
            request has T / B adjacent tokens.
        max_len: Columns of the result, default M · R.

    Returns:
        logits: [T, max_len] float32. Columns at or past a token's length are not written: bound by length, as
            `select_topk` does.

    Raises:
        ArgumentError: A dtype, rank, axis or stride is wrong; T is not a multiple of B; max_len < 1.
        UnsupportedError: I > 128.

    Numerics as `indexer_logits`. Time follows the lengths, not max_len: a fixed number of programs shares the work by
    the lengths themselves.

    Bits may differ where an array starts on another address modulo 16 bytes.
    """


def check(problem: Problem) -> None:
    check_paged_cache(problem)
    check_requests(problem, "q8")
    max_len = problem.attrs["max_len"]
    if max_len is not None and max_len < 1:
        problem.refuse("max_len", "value", max_len, "at least 1")


def check_paged_cache(problem: Problem) -> None:
    """Rules of the quantised query and the pages that it reads."""
    check_query(problem)
    check_indexer_row(problem, "cache", "ROW")
    check_indexer_pages(problem)
    check_query_dtype(problem)


def check_requests(problem: Problem, argument: str) -> None:
    """Without request ids every request has the same number of tokens; without a request there is no token."""
    tokens, requests = problem["T"], problem["B"]
    if not problem.has("request_ids") and (tokens % requests if requests else tokens):
        problem.refuse(argument, "axis T (axis 0)", tokens, f"a multiple of B = {requests} (or pass request_ids)")


OP = Op(
    prototype=indexer_logits_paged,
    tensors={
        "q8": QUERY,
        "weights": Tensor("T I", F32),
        "cache": Tensor("P R ROW", BYTES),
        "block_table": Tensor("B M", INDEX, index_of="P"),
        "lengths": Tensor("T", INDEX),
        "request_ids": Tensor("T", INDEX, index_of="B"),
    },
    outputs={"logits": lambda p: Spec((p["T"], columns(p)), "float32")},
    check=check,
    limits=paged_limits,
    plan=plan,
    implementations=("triton", "gluon"),
    reference=reference,
    cases=CASES,
)
