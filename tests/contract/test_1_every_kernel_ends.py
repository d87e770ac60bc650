"""Clause 1: every kernel terminates for any input bytes; loop bounds are clamped to a capacity the host knows."""

import kit
import numpy as np
import pytest
from garbage import DEVICE, OPS, garbage_inputs, run
from hypothesis import given, settings

from xmla import torch_api


@pytest.mark.timeout(120)  # a kernel that does not end fails, rather than the run
@pytest.mark.parametrize("name", sorted(OPS))
def test_garbage_integers_give_the_definition(name: str) -> None:
    """Every call returns, agrees with the definition and writes nothing beside its outputs."""
    op = OPS[name]

    @given(garbage_inputs(op))
    @settings(max_examples=12)
    def check(drawn: tuple[dict[str, np.ndarray], dict[str, object]]) -> None:
        inputs, attrs = drawn
        guarded = {n: kit.guarded(a) for n, a in inputs.items()}
        got = run(op, {n: a for n, (a, _) in guarded.items()}, attrs)
        with np.errstate(all="ignore"):
            want = op.reference(**inputs, **attrs)
        if op.mutates:
            kit.assert_bits_equal(name, got[0], inputs[op.mutates[0]])
        for (label, value), result in zip(kit.results(op, want), got, strict=False):
            if name != "dsa_attention":  # garbage keys are legitimately NaN there; its parts are compared
                kit.assert_close(label, result, value, kit.tolerance_of(op, label), kit.written(op, value))
        for array, buffer in guarded.values():
            margin = np.ones(len(buffer), bool)
            if array.size:
                first = array.ctypes.data - buffer.ctypes.data
                margin[first : first + kit._span(array) * array.itemsize] = False
            assert (buffer[margin] == kit.CANARY).all()

    check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("name", sorted(OPS))
def test_arrays_of_one_byte(name: str, byte: int) -> None:
    """Every input filled with one byte: NaN, the least and the largest integers, all at once."""
    op = OPS[name]
    inputs = kit.make(op.cases[0])
    for argument, array in inputs.items():
        if name.startswith("write") and argument == "slots":
            continue  # valid slots are distinct
        inputs[argument] = np.full(array.nbytes, byte, np.uint8).view(array.dtype).reshape(array.shape)
    arguments = kit.torch_inputs(op, inputs, DEVICE)
    results = kit.as_tuple(getattr(torch_api, name)(*arguments, **op.cases[0].attrs))
    assert len(results) == len(op.outputs)
    for result in results:
        kit.as_numpy(result)  # waits for the kernel
