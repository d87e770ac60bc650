"""Every op with each axis at 0 and at 1, in both frameworks: refused by name, or as the reference, in its memory."""

from dataclasses import replace
from typing import Any

import kit
import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import HAS_GPU

from xmla import ArgumentError, UnsupportedError, torch_api
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V4, V32, MlaLayout
from xmla.core.op import Op
from xmla.core.registry import registry
from xmla.core.values import Tolerance
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS

OPS = registry()
ATTENTION = OPS["sparse_mla"]


def outcome(op: Op, inputs: dict[str, np.ndarray], attrs: dict[str, Any], device: str, by: str | None) -> Any:
    """Results and updated arguments, or the refusal."""
    arguments = [None if n not in inputs else tensor_of(inputs[n], device) for n in op.tensors]
    try:
        found = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **attrs, implementation=by))
    except (ArgumentError, UnsupportedError) as refused:
        return str(refused)
    updated = dict(zip(op.tensors, arguments, strict=True))
    return {**dict(zip(op.outputs, found, strict=True)), **{name: updated[name] for name in op.mutates}}


def outcome_in_jax(op: Op, inputs: dict[str, np.ndarray], attrs: dict[str, Any]) -> Any:
    try:
        found = kit.as_tuple(getattr(JAX_OPS, op.name)(*kit.jax_inputs(op, inputs), **attrs))
    except (ArgumentError, UnsupportedError) as refused:
        return str(refused)
    return dict(zip([*op.outputs, *op.mutates], found, strict=True))


def tensor_of(array: np.ndarray, device: str) -> torch.Tensor:
    """Without elements as torch makes it of NumPy's array, with strides of 0."""
    if array.size:
        return kit.to_torch(array, device)
    return torch.zeros((1,) * array.ndim, dtype=getattr(torch, array.dtype.name), device=device).expand(array.shape)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("op", OPS.values(), ids=kit.case_id)
def test_axes_at_0_and_1(op: Op, size: int, device: str) -> None:
    case = kit.smallest(op)
    whole = kit.make(case)
    refused = []
    for axis in kit.axes(op, whole):
        if axis == "B" and size and "state_table" in whole:
            continue  # the tokens of all requests would be one's, which have distinct positions
        cut = kit.with_axis(op, whole, axis, size)
        guarded = {name: kit.guarded(array) for name, array in cut.items()}
        inputs = {name: array for name, (array, _) in guarded.items()}
        defined = outcome(op, kit.copies(cut), dict(case.attrs), device, "reference")
        found = outcome(op, inputs, dict(case.attrs), device, None)
        in_jax = outcome_in_jax(op, cut, dict(case.attrs))
        if isinstance(found, str):
            assert found == defined == in_jax and found.startswith(f"{op.name}: "), (axis, defined)
            refused.append(axis)
            continue
        assert not isinstance(defined, str) and not isinstance(in_jax, str), (axis, defined, in_jax)
        given = kit.copies(cut)
        with np.errstate(all="ignore"):
            values = op.reference(**given, **kit.attributes(op, case))
        for (name, result), value in zip(op.outputs.items(), values, strict=True):
            where = result.written(np.asarray(value))
            agreement = result.agreement
            if isinstance(agreement, Tolerance):
                # A probability, rounded, is a factor of a row, and there may be one row. What rounds to nearly 0 has no
                # direction.
                agreement = replace(agreement, factor=np.inf, cosine=agreement.cosine if np.any(value) else np.inf)
            kit.assert_close(f"{name}, {axis} = {size}", found[name], value, agreement, where)
        for name in op.mutates:
            kit.assert_updated(op, kit.attributes(op, case), given, name, found[name])
        where = kit.written(op, values) if op.partial else None
        for name, result in in_jax.items():
            kit.assert_bits_equal(f"{name} in JAX, {axis} = {size}", found[name], result, where)
        if not HAS_GPU:
            for name, (_, buffer) in guarded.items():
                if buffer.size:
                    edges = np.concatenate([buffer[:256], buffer[-256:]])
                    assert (edges == kit.CANARY).all(), (name, axis)
    assert "T" not in refused or size, "no token is no mistake"
    if not size and op.tensors.keys() & {"weights", "index_weights"}:
        assert "I" in refused, "of no index heads a key that is NaN gives NaN, or 0 by the formula"


@pytest.mark.parametrize("implementation", [None, "triton"] if HAS_GPU else [None])
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("layout", [V32, V4, PLAIN, PLAIN_V4], ids=lambda layout: layout.name)
def test_scores_of_minus_infinity_are_no_keys(
    layout: MlaLayout, heads: int, implementation: str | None, device: str
) -> None:
    """By overflow of q · k. A row of such keys alone has none, however its keys are split; a sink changes nothing."""
    rows = np.ones((64, layout.dims), np.float32)
    pool = np.zeros((1, 64, layout.row), np.uint8 if layout.packed else ml_dtypes.bfloat16)
    layout.scatter(pool, np.arange(64), rows[:, : layout.latent], rows[:, layout.latent :])
    q = np.ones((2, heads, layout.dims), ml_dtypes.bfloat16)
    q[0] = -3e38
    slots = np.resize(np.arange(64, dtype=np.int32), (2, 700 if HAS_GPU else 130))
    given = [kit.to_torch(array, device) for array in (q, pool, slots)]
    for sink in (None, torch.ones(heads, device=device)):
        out, lse = torch_api.sparse_mla(*given, sink=sink, softmax_scale=1.0, implementation=implementation)
        assert (lse[0] == -torch.inf).all() and not out[0].any()
        assert lse[1].isfinite().all() and out[1].all()
    q[0] = -np.inf  # of which float64 has no number either
    want = ATTENTION.reference(q, pool, slots, softmax_scale=1.0)
    assert (want[1][0] == -np.inf).all() and not want[0][0].any() and np.isfinite(want[0]).all()
