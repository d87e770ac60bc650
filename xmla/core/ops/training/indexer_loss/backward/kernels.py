import triton
import triton.language as tl

from xmla.core.lang.offsets import offset_of


@triton.jit
def scale_kernel(
    gradient_ptr,  # [T, I, D], or with fewer axes
    dloss_ptr,  # [1] f32
    num_elements,
    scaled_ptr,  # as gradient, dense
    STRIDE_OUTER: tl.constexpr,
    STRIDE_INNER: tl.constexpr,
    INNER: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = offset_of(tl.program_id(0), BLOCK) + tl.arange(0, BLOCK)
    mask = offs < num_elements
    row = offs // DIMS
    place = offset_of(row // INNER, STRIDE_OUTER) + offset_of(row % INNER, STRIDE_INNER) + offs % DIMS
    gradient = tl.load(gradient_ptr + place, mask=mask, other=0.0).to(tl.float32)
    scaled = gradient * tl.load(dloss_ptr)
    tl.store(scaled_ptr + offs, scaled.to(scaled_ptr.dtype.element_ty), mask=mask)
