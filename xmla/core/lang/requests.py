"""Requests inside kernels."""

import triton
import triton.language as tl


@triton.jit
def request_of_token(request_ids_ptr, token, num_requests, next_n, HAS_REQUEST_IDS: tl.constexpr):
    """The request of a token, −1 if there is none."""
    request = token // next_n
    if HAS_REQUEST_IDS:
        request = tl.load(request_ids_ptr + token)
    return tl.where((request >= 0) & (request < num_requests), request, -1)
