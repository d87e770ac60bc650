"""What the tests of the Gluon kernels for Hopper share."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from xmla.core.errors import UnsupportedError
from xmla.core.lang.gluon import gl
from xmla.core.op import Op, plan_call
from xmla.core.values import H200, Spec

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]
# Kernels that select are chosen with a Triton that has it: with an older one the portable kernels serve these calls.
NEEDS_INLINE_PTX = pytest.mark.skipif(not hasattr(gl, "inline_asm"), reason="needs Triton 3.9")


def supported(op: Op, inputs: Mapping[str, np.ndarray], attrs: Mapping[str, object]) -> bool:
    """Whether the Gluon kernel for Hopper supports the call."""
    specs = tuple(Spec.of_numpy(inputs[name]) if name in inputs else None for name in op.tensors)
    try:
        plan_call(op, specs, op.attributes(**attrs), H200, "gluon")
    except UnsupportedError:
        return False
    return True
