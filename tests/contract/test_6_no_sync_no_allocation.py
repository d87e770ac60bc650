"""Clause 6: no host sync, and no allocation besides the plan's buffers."""

import kit
import pytest
import torch
from garbage import DEVICE, OPS

from xmla.torch_api._all_ops import TORCH_OPS


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", sorted(OPS))
def test_allocates_the_plan_and_nothing_else(name: str) -> None:
    op = OPS[name]
    case = op.cases[-1]
    arguments = kit.torch_inputs(op, kit.make(case), DEVICE)
    function = getattr(TORCH_OPS, name)
    function(*arguments, **case.attrs)
    torch.cuda.synchronize()
    plan = function.plan(*arguments, **case.attrs)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")  # a host read of a device value would raise
    try:
        function(*arguments, **case.attrs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == sum(plan.buffers[name].nbytes > 0 for name in plan.results) + (plan.workspace_bytes > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.outputs))
def test_allocates_nothing_with_out_and_workspace(name: str) -> None:
    op = OPS[name]
    case = op.cases[-1]
    arguments = kit.torch_inputs(op, kit.make(case), DEVICE)
    function = getattr(TORCH_OPS, name)
    want = kit.as_tuple(function(*arguments, **case.attrs))
    out = tuple(torch.zeros_like(tensor) for tensor in want)
    workspace = torch.empty(function.plan(*arguments, **case.attrs).workspace_bytes, dtype=torch.uint8, device=DEVICE)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    function(*arguments, **case.attrs, out=out if len(out) > 1 else out[0], workspace=workspace)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
