"""The kernel that clears a buffer, of the launch in `core/plan/clearing.py`."""

import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of


@triton.jit
def clear_kernel(
    num_elements,
    cleared_ptr,
    BLOCK: tl.constexpr,
):
    offs = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    tl.store(cleared_ptr + offs, tl.zeros([BLOCK], cleared_ptr.dtype.element_ty), mask=offs < num_elements)
