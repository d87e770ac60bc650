"""Equal inputs give equal bits through the two front-ends, and JAX's results are the reference's."""

import jax
import kit
import numpy as np
import pytest
from test_ops import check

from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS


@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op in registry().values() for case in kit.cases(op)], ids=kit.case_id
)
def test_torch_and_jax_agree_bit_for_bit(op: Op, case: Case, device: str) -> None:
    inputs = kit.make(case, seed=1)
    dense = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    arguments = kit.torch_inputs(op, kit.copies(dense), device)
    ours = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **case.attrs))
    ours += tuple(arguments[list(op.tensors).index(name)] for name in op.mutates)
    function = jax.jit(lambda *arrays: getattr(JAX_OPS, op.name)(*arrays, **case.attrs))
    theirs = kit.as_tuple(function(*kit.jax_inputs(op, inputs)))
    assert len(ours) == len(theirs) > 0

    check(op, case, inputs, theirs[: len(op.outputs)], dict(zip(op.mutates, theirs[len(op.outputs) :], strict=True)))
    where = None
    if op.partial:  # the rest is never written
        where = kit.written(op, op.reference(**inputs, **kit.attributes(op, case)))
    for name, a, b in zip([*op.outputs, *op.mutates], ours, theirs, strict=True):
        kit.assert_bits_equal(name, a, b, where)
