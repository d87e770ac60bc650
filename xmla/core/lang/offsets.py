"""Index times stride: the one place where kernels multiply them.

A 32-bit index times a stride is a 32-bit product, which wraps if the offset passes 2**31: in a query stored as
[H, T, 576] with 32768 tokens, from head 114 on. `offset_of` is for Triton kernels, `gluon_offset_of` for Gluon kernels,
which cannot call Triton's functions.
"""

import triton
import triton.language as tl
from triton.experimental import gluon


def _offset_of(index, STRIDE, BOUND=None):
    """index · STRIDE, exact if −BOUND < index < BOUND, or without BOUND always.

    BOUND is a constant; without it STRIDE may be a runtime size. The product has 32 bits only if the constants prove
    that it fits; otherwise the index is widened first. The offset of an index beyond its BOUND must be masked.
    """
    if BOUND is None or BOUND * STRIDE >= 2**31:
        return index.to(tl.int64) * STRIDE
    else:
        return index * STRIDE


@triton.jit
def multiple(size, UNIT: tl.constexpr):
    """`size`, a multiple of UNIT. The compiler knows that of the result: it takes runtime sizes for arbitrary.

    So whole vectors are loaded although a stride is not a constant, for each value of which a kernel would be compiled.
    """
    return size // UNIT * UNIT


offset_of = triton.jit(_offset_of)
gluon_offset_of = gluon.jit(_offset_of)
