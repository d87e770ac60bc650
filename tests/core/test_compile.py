"""Every kernel configuration compiles for every architecture, without its hardware, and fits the part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HAS_GPU, require_assembler

from xmla.core.device import B200, B300, GB10, H200, RTX_PRO_6000, Device
from xmla.core.op import registry

SCRIPT = Path(__file__).with_name("compile_plans.py")
TENSOR_MEMORY_COLUMNS = 512


@pytest.mark.parametrize("device", [H200, B200, B300, RTX_PRO_6000, GB10], ids=lambda device: f"sm_{device.arch}")
def test_every_configuration_compiles(device: Device) -> None:
    require_assembler(device.arch)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(device.arch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]

    assert {kernel["case"].split()[0] for kernel in kernels} == set(registry()), "an op was not compiled"
    for kernel in kernels:
        assert kernel["cubin_bytes"] > 0, kernel
        assert kernel["shared"] <= device.smem_bytes, kernel
        assert kernel["tensor_memory"] <= TENSOR_MEMORY_COLUMNS, kernel
        assert not kernel["trap"], kernel

    if device.arch == 90:
        by_hand = [kernel for kernel in kernels if kernel["kernel"] == "sparse_mla_sm90_kernel"]
        assert len(by_hand) >= 2 and all("wgmma.mma_async" in kernel["mma"] for kernel in by_hand)
        assert all(kernel["stack_bytes"] in ((0, None) if HAS_GPU else (0,)) for kernel in by_hand), "registers spill"

    native = {90: "wgmma.mma_async", 100: "tcgen05.mma", 103: "tcgen05.mma"}.get(device.arch, "mma.sync")
    for name, block_h in (("sparse_mla_kernel", 64), ("indexer_logits_kernel", 0), ("indexer_logits_paged_kernel", 0)):
        used = [
            set(k["mma"]) for k in kernels if k["kernel"] == name and (k["block_h"] >= block_h or native == "mma.sync")
        ]
        assert used, f"no {name} for sm_{device.arch}"
        assert any(native in instructions for instructions in used), (name, used)
