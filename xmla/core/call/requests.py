"""Requests of a batch: their tokens and their lengths.

Tokens are flat rows, the tokens of a request adjacent. `request_ids` [T] gives each token's row of `block_table`;
without it every request has T / B tokens. A token with an id outside [0, B) has no request.
"""

from collections.abc import Iterator

import numpy as np

from xmla.core.call.problem import Arrays, Limit, Problem

ALIGNED = 4  # integers of 16 bytes, which kernels read at once from arrays that start on their multiples


def check_requests(problem: Problem, argument: str) -> None:
    """Check that without request ids all requests have the same number of tokens, and that B = 0 has no tokens.

    `argument`: an argument with an axis T, for the error.
    """
    if not problem.has("request_ids") and (expected := unequal(problem["T"], problem["B"])):
        problem.refuse(argument, "axis T (axis 0)", problem["T"], expected)


def unequal(tokens: int, requests: int) -> str | None:
    """What tokens are expected to be without request ids, if they are no equal number of each request."""
    return (
        f"a multiple of B = {requests} (or pass request_ids)" if (tokens % requests if requests else tokens) else None
    )


def whole_vectors(tokens: int) -> int:
    """Tokens of each of several calls, at most so many, for which integers of all of them start on whole vectors."""
    return tokens - tokens % ALIGNED or tokens


def tokens_a_request(problem: Problem) -> int:
    """Adjacent tokens per request in a call without request ids; 1 with request ids or in an empty call."""
    return 1 if problem.has("request_ids") else max(problem["T"] // max(problem["B"], 1), 1)


def requests_of(arrays: Arrays, tokens: int, requests: int) -> np.ndarray:
    """The request id of each token [T]; it may be out of range."""
    if "request_ids" in arrays:
        return arrays["request_ids"]
    return np.arange(tokens) // max(tokens // max(requests, 1), 1)


def id_limits(problem: Problem, arrays: Arrays) -> Iterator[Limit]:
    """Limits of `request_ids`, if given."""
    if "request_ids" in arrays:
        yield Limit("request_ids", -1, problem["B"] - 1)


def paged_limits(problem: Problem, arrays: Arrays, cache: str = "cache") -> Iterator[Limit]:
    """Limits of a batch over pages: lengths, request ids, and the page ids that these lengths reach."""
    pages, entries, _ = problem.specs[cache].shape
    table, lengths = arrays["block_table"], arrays["lengths"]
    yield Limit("lengths", 0, table.shape[1] * entries)
    yield from id_limits(problem, arrays)
    requests = requests_of(arrays, len(lengths), len(table))
    reach = np.zeros(len(table), np.int64)
    known = (requests >= 0) & (requests < len(table))
    np.maximum.at(reach, requests[known], lengths[known])
    yield Limit("block_table", 0, pages - 1, np.arange(table.shape[1]) * entries < reach[:, None])
