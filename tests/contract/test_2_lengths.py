"""Clause 2: lengths are signed and clamped to [0, capacity]; negative is empty; padded rows of a graph are legal."""

import kit
import numpy as np
import pytest
import torch
from conftest import EVERYTHING
from garbage import DEVICE, OPS, run

from xmla import torch_api

NASTY = np.array([-(2**31), -(2**31) + 1, -7, -1, 0, 1, 2**30, 2**31 - 1], np.int64)


CLAMPED = [
    (name, argument)
    for name, op in sorted(OPS.items())
    for argument in ("lengths", "ends", "starts")
    if argument in op.tensors and name not in ("dsa_attention", "dsa_step")  # whose parts are compared
]


@pytest.mark.parametrize(("name", "argument"), CLAMPED)
def test_any_length_is_the_clamped_one(name: str, argument: str) -> None:
    """Every value around 0, the capacity and the limits of int32 gives what the reference gives."""
    op = OPS[name]
    assert any(argument in kit.make(case) for case in op.cases)
    for number, case in enumerate(kit.cases(op)):
        inputs = kit.make(case)
        if argument not in inputs:
            continue
        # Rows of a small batch meet the other values in turn, or those of the next case do.
        shifts = range(3 if inputs[argument].size < len(NASTY) else 1)
        for shift in shifts if EVERYTHING else [number % 3]:
            values = np.resize(np.roll(NASTY, shift), inputs[argument].shape)
            inputs[argument] = values.astype(np.int32)
            with np.errstate(all="ignore"):
                want = op.reference(**inputs, **kit.attributes(op, case))
            for (label, value), got in zip(kit.results(op, want), run(op, inputs, case.attrs), strict=True):
                kit.assert_close(label, got, value, op.outputs[label].agreement, op.outputs[label].written(value))


def test_padded_rows_of_a_graph() -> None:
    """Length 0, slot −1, no request and stale everything else: rows of zeros and −inf, whatever the caches hold."""
    op = OPS["dsa_attention"]
    case = op.cases[2]
    inputs = kit.make(case)
    inputs["lengths"][:] = 0
    inputs["request_ids"][:] = [-1, 0, 99, -(2**31)]
    inputs["block_table"][:] = 2**31 - 1
    out, lse, indices = run(op, inputs, case.attrs)
    assert not out.any() and (lse == -torch.inf).all() and (indices == -1).all()
    pool = torch.full((2, 64, 656), 0x5A, dtype=torch.uint8, device=DEVICE)
    rows = (
        torch.ones(3, 512, device=DEVICE, dtype=torch.bfloat16),
        torch.ones(3, 64, device=DEVICE, dtype=torch.bfloat16),
    )
    torch_api.write_mla_cache(*rows, torch.full((3,), -1, dtype=torch.int32, device=DEVICE), pool)
    assert (pool == 0x5A).all()
