"""Requests inside kernels."""

import triton
import triton.language as tl


@triton.jit
def request_of(request_ids_ptr, num_requests, next_n, HAS_REQUEST_IDS: tl.constexpr):
    """The request of this program's token, −1 if there is none."""
    request = tl.program_id(0) // next_n
    if HAS_REQUEST_IDS:
        request = tl.load(request_ids_ptr + tl.program_id(0))
    return tl.where((request >= 0) & (request < num_requests), request, -1)


@triton.jit
def request_of_token(request_ids_ptr, token, num_requests, next_n, HAS_REQUEST_IDS: tl.constexpr):
    """The request of a token, −1 if there is none; of kernels whose programs are no tokens."""
    request = token // next_n
    if HAS_REQUEST_IDS:
        request = tl.load(request_ids_ptr + token)
    return tl.where((request >= 0) & (request < num_requests), request, -1)
