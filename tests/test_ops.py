"""Every op and case against the NumPy float64 reference; under JAX in tests/test_parity.py."""

import kit
import numpy as np
import pytest
import torch

from xmla import torch_api
from xmla.core.op import Case, Op
from xmla.core.registry import registry
from xmla.core.values import DTYPES, Spec, Tolerance, difference
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS

CASES = kit.all_cases()


@pytest.mark.parametrize(("op", "case"), CASES, ids=kit.case_id)
def test_torch(op: Op, case: Case, device: str) -> None:
    inputs = kit.make(case)
    guarded = {name: kit.guarded(array) for name, array in inputs.items()}
    arguments = [kit.to_torch(guarded[n][0], device) if n in guarded else None for n in op.tensors]
    got = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **case.attrs))
    check(op, case, inputs, got, dict(zip(op.tensors, arguments, strict=True)))
    for name, (array, buffer) in guarded.items():
        untouched = np.ones(len(buffer), bool)
        first = array.ctypes.data - buffer.ctypes.data if buffer.size else 0
        untouched[first : first + kit.span(array) * array.itemsize] = False
        assert (buffer[untouched] == kit.CANARY).all(), f"{name}: memory beside the array was written"


def check(op: Op, case: Case, inputs: dict[str, np.ndarray], got: tuple, mutated: dict[str, object]) -> None:
    """Compare results with the reference's, computed after them so that they cannot be found in freed memory."""
    reference = op.reference(**inputs, **kit.attributes(op, case))
    assert len(got) == len(op.outputs)
    for (name, want), value in zip(kit.results(op, reference), got, strict=True):
        kit.assert_close(name, value, want, op.outputs[name].agreement, op.outputs[name].written(want))
    for name in op.mutates:
        kit.assert_updated(op, case.attrs, inputs, name, mutated[name])


@pytest.mark.parametrize(("op", "case"), [(op, case) for op, case in CASES if op.needs], ids=kit.case_id)
def test_a_result_needs_no_other_arguments_than_those_declared(op: Op, case: Case, device: str) -> None:
    """Inside of a shard_map JAX takes it for the same on devices that differ in the others alone."""

    def results(inputs: dict[str, np.ndarray]) -> dict[str, object]:
        arguments = kit.torch_inputs(op, inputs, device)
        got = kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **case.attrs))
        return dict(zip(op.outputs, got, strict=True)) | dict(zip(op.tensors, arguments, strict=True))

    inputs = kit.make(case)
    whole = results(inputs)
    for name, needed in op.needs.items():
        assert {*needed.split()} <= {*op.tensors}
        some = {n: array if n in needed.split() else np.zeros_like(array) for n, array in inputs.items()}
        kit.assert_bits_equal(name, results(some)[name], kit.as_numpy(whole[name]))


@pytest.mark.parametrize("name", sorted(registry()))
def test_reference_implementation(name: str, device: str) -> None:
    """implementation="reference" is the reference itself, rounded to the op's dtypes, in both front-ends."""
    op = registry()[name]
    case = op.cases[-1]
    arguments = kit.torch_inputs(op, kit.make(case), device)
    got = kit.as_tuple(getattr(TORCH_OPS, name)(*arguments, **case.attrs, implementation="reference"))
    under_jax = kit.as_tuple(
        getattr(JAX_OPS, name)(*kit.jax_inputs(op, kit.make(case)), **case.attrs, implementation="reference")
    )
    inputs = kit.make(case)
    reference = op.reference(**inputs, **kit.attributes(op, case))
    for (label, want), ours, theirs in zip(kit.results(op, reference), got, under_jax, strict=False):
        dtype = kit.as_numpy(ours).dtype
        kit.assert_bits_equal(label, ours, np.asarray(want).astype(dtype))
        kit.assert_bits_equal(label, theirs, np.asarray(want).astype(dtype))
    for label, updated in zip(op.mutates, under_jax[len(op.outputs) :], strict=True):
        kit.assert_bits_equal(label, arguments[list(op.tensors).index(label)], inputs[label])
        kit.assert_bits_equal(label, updated, inputs[label])


FLOATS = [op for op in registry().values() if any(isinstance(r.agreement, Tolerance) for r in op.outputs.values())
          or any(op.updates.values())]  # fmt: skip


@pytest.mark.parametrize("op", FLOATS, ids=kit.case_id)
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_factor_is_refused(op: Op, sign: int) -> None:
    """Of 1.003, of gradients 1.005, on each computed result, in a case of it. The reference, rounded, agrees."""
    refused, every = set(), set()
    for case in op.cases:
        inputs, attrs = kit.make(case), kit.attributes(op, case)
        specs = {name: Spec.of_numpy(array) for name, array in inputs.items()}
        results = op.bind(specs, op.attributes(**case.attrs)).results
        with np.errstate(all="ignore"):
            reference = op.reference(**inputs, **attrs)
            given = [(name, want, op.outputs[name].agreement, DTYPES[results[name].dtype][0])
                     for name, want in kit.results(op, reference)]  # fmt: skip
            given += [(name, updated.values(inputs[name], inputs, attrs),
                       updated.agreement(inputs[name], inputs, attrs), np.dtype(np.float64))
                      for name, updated in op.updates.items() if updated is not None]  # fmt: skip
            for name, want, agreement, dtype in given:
                written = op.outputs[name].written(want) if name in op.outputs else None
                right = np.asarray(want, np.float64)[... if written is None else written]
                if not isinstance(agreement, Tolerance) or not np.nan_to_num(right, posinf=0, neginf=0).any():
                    continue
                every.add(name)
                assert difference(right.astype(dtype), right, agreement) is None, (case.name, name)
                factor = 1 + sign * max(3e-3, 2.5 * agreement.factor)
                if difference((factor * right).astype(dtype), right, agreement) is not None:
                    refused.add(name)
    assert every and refused == every


def test_paged_logits_leave_columns_past_a_length_untouched(device: str) -> None:
    op = registry()["indexer_logits_paged"]
    for case in op.cases:
        inputs = kit.make(case)
        (want,) = op.reference(**inputs, **kit.attributes(op, case))
        dtype = getattr(torch, case.attrs.get("logits_dtype", "float32"))
        out = torch.full(want.shape, 123.0, dtype=dtype, device=device)
        torch_api.indexer_logits_paged(*kit.torch_inputs(op, inputs, device), **case.attrs, out=out)
        past = np.isnan(want)
        assert past.any() and (kit.as_numpy(out)[past] == 123.0).all()


OF_LOGITS = [op for op in registry().values() if "logits_dtype" in op.defaults]


@pytest.mark.parametrize("op", OF_LOGITS, ids=lambda op: op.name)
def test_logits_in_bfloat16_are_those_in_float32_rounded(op: Op, device: str) -> None:
    for case in op.cases:
        if case.attrs.get("logits_dtype") == "bfloat16":
            inputs, attrs = kit.torch_inputs(op, kit.make(case), device), dict(case.attrs)
            del attrs["logits_dtype"]
            exact, half = (
                kit.as_tuple(getattr(TORCH_OPS, op.name)(*inputs, **attrs | more))[0]
                for more in ({}, {"logits_dtype": "bfloat16"})
            )
            (want, *_) = op.reference(**kit.make(case), **kit.attributes(op, case))
            written = ~np.isnan(want)
            assert exact.dtype == torch.float32 and half.dtype == torch.bfloat16
            kit.assert_bits_equal(op.name, half, kit.as_numpy(exact.bfloat16()), written)
