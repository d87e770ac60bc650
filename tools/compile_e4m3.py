"""Compiles the conversions of e4m3, an element a thread, for an architecture and prints their PTX as a JSON line.

A script of its own, as compile_plans.py: kernels compile only where TRITON_INTERPRET was not set.
    python -m tools.compile_e4m3 80
"""

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xmla.core.lang.numbers import decode_e4m3, encode_e4m3


@triton.jit
def decode_kernel(codes_ptr, values_ptr, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(values_ptr + place, decode_e4m3(tl.load(codes_ptr + place)))


@triton.jit
def encode_kernel(x_ptr, codes_ptr, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(codes_ptr + place, encode_e4m3(tl.load(x_ptr + place)))


if __name__ == "__main__":
    target, code = GPUTarget("cuda", int(sys.argv[1]), 32), {}
    for kernel, *types in ((decode_kernel, "*u8", "*fp32"), (encode_kernel, "*fp32", "*u8")):
        signature = dict(zip(kernel.arg_names, (*types, "constexpr"), strict=True))
        source = ASTSource(fn=kernel, signature=signature, constexprs={(2,): 32})
        code[kernel.__name__] = triton.compile(source, target=target, options={"num_warps": 1}).asm["ptx"]
    print(json.dumps(code))
