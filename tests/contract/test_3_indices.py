"""Clause 3: an index outside [0, total) is skipped wherever it stands; nothing outside the given tensors is touched."""

import kit
import numpy as np
import pytest
import torch
from garbage import DEVICE, OPS, run

from xmla.core.values import ATTENTION_OUT
from xmla.torch_api._all_ops import TORCH_OPS


@pytest.mark.parametrize("wrong", [-1, -(2**31), 2**31 - 1, "total"])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_an_invalid_slot_is_as_if_it_were_not_there(place: int, wrong: int | str) -> None:
    """At the head, inside and at the end of a row: the attention over the other slots, bit for bit."""
    op = OPS["sparse_mla"]
    inputs = kit.make(op.cases[0])
    pages, entries, _ = inputs["cache"].shape
    keys = inputs["slots"].shape[1]
    lengths = np.full(len(inputs["slots"]), keys, np.int32)
    with_hole = inputs["slots"].copy()
    with_hole[:, place] = pages * entries if wrong == "total" else wrong
    gone = inputs["slots"].copy()
    gone[:, place] = -1
    attrs = op.cases[0].attrs
    for a, b in zip(
        run(op, inputs | {"slots": with_hole, "lengths": lengths}, attrs),
        run(op, inputs | {"slots": gone, "lengths": lengths}, attrs),
        strict=True,
    ):
        kit.assert_bits_equal("row", a, b)
    want = op.reference(**inputs | {"slots": with_hole, "lengths": lengths}, **kit.attributes(op, op.cases[0]))
    out, _ = run(op, inputs | {"slots": with_hole, "lengths": lengths}, attrs)
    kit.assert_close("out", out, want[0], ATTENTION_OUT)


@pytest.mark.parametrize("name", sorted(n for n in OPS if OPS[n].outputs))
def test_nothing_is_written_beside_the_results(name: str) -> None:
    op = OPS[name]
    for case in kit.cases(op):
        arguments = kit.torch_inputs(op, kit.make(case), DEVICE)
        function = getattr(TORCH_OPS, name)
        plan = function.plan(*arguments, **case.attrs)
        results = [plan.buffers[result] for result in plan.results]
        buffers = [torch.full((spec.nbytes + 512,), kit.CANARY, dtype=torch.uint8, device=DEVICE) for spec in results]
        out = tuple(
            buffer[256:-256].view(getattr(torch, spec.dtype)).view(spec.shape)
            for buffer, spec in zip(buffers, results, strict=True)
        )
        function(*arguments, **case.attrs, out=out if len(out) > 1 else out[0])
        for buffer in buffers:
            assert (buffer[:256] == kit.CANARY).all() and (buffer[-256:] == kit.CANARY).all()
            assert len(buffer) == 512 or (buffer[256:-256] != kit.CANARY).any(), "nothing was written"
