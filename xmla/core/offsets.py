"""Indices times strides: the one place where kernels multiply them.

An index of 32 bits times a stride is a product of 32 bits, which wraps round where the offset passes 2**31: in a query
stored as [H, T, 576] with 32768 tokens, from head 114 on. `offset_of` is for Triton's kernels, `gluon_offset_of` the
same for Gluon's, which call none of Triton's functions.
"""

import triton
import triton.language as tl
from triton.experimental import gluon


def _offset_of(index, STRIDE, BOUND=None):
    """index · STRIDE, exactly wherever −BOUND < index < BOUND; without BOUND always.

    BOUND is a constant; STRIDE may be a runtime size where there is none. The product has 32 bits only where the
    constants tell that it fits them; elsewhere the index is widened first. What an index beyond its BOUND gives must be
    masked.
    """
    if BOUND is None or BOUND * STRIDE >= 2**31:
        return index.to(tl.int64) * STRIDE
    else:
        return index * STRIDE


offset_of = triton.jit(_offset_of)
gluon_offset_of = gluon.jit(_offset_of)
