"""The launch that clears a buffer which kernels then mark, or add to."""

from xmla.core.lang.clearing import clear_kernel
from xmla.core.plan.plan import Launch
from xmla.core.values import cdiv

BLOCK = 4096  # elements of a program


def clear(array: str, elements: int) -> Launch:
    """Set every element of a plan's buffer to 0."""
    return Launch(
        clear_kernel,
        grid=(cdiv(elements, BLOCK),),
        outputs=("cleared",),
        arrays={"cleared": array},
        sizes={"num_elements": elements},
        constexprs={"BLOCK": BLOCK},
    )
