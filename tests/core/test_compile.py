"""Every kernel configuration compiles for every architecture, without its hardware, and fits the part."""

import os

import pytest
import support_matrix
from compile_plans import DEVICES
from conftest import HAS_GPU, require_assembler
from tritons import OLDER, folder

from xmla.core.device import MIN_E4M3_ARCH, Device
from xmla.core.op import registry

TENSOR_MEMORY_COLUMNS = 512
# Bytes with Triton 3.9: MXFP4 keys against candidates.
SPILLED = {(arch, "indexer_topk_kernel"): 32 for arch in (120, 121)}
NATIVE = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 103: "tcgen05.mma",
          120: "mma.sync", 121: "mma.sync"}  # fmt: skip


def check_fits(kernel: support_matrix.Line, device: Device) -> None:
    assert kernel["cubin_bytes"] > 0, kernel
    assert kernel["shared"] <= device.smem_bytes, kernel
    assert kernel["tensor_memory"] <= TENSOR_MEMORY_COLUMNS, kernel
    assert not kernel["trap"], kernel
    assert kernel["serialized"] is None, kernel
    assert kernel["ptx"] <= 8.8, "JAX assembles with its own ptxas, which may be of CUDA 12.9"
    # Rows come by 16 bytes, though the compiler does not see their alignment: by 4 attention takes a fifth longer.
    if kernel["kernel"].endswith("_sm90_kernel"):
        others = {4} if kernel["kernel"].startswith("indexer_logits_paged") else set()  # scales, one a key
        assert set(kernel["copies"]) <= {16} | others, kernel


# Of each code generator one architecture: 25 minutes on two cores for all. `make matrix` compiles the others too.
OLDER_ARCHITECTURES = support_matrix.ARCHITECTURES if os.environ.get("XMLA_MATRIX") else (90, 100, 120)


@pytest.mark.parametrize("arch", OLDER_ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
@pytest.mark.parametrize("version", OLDER)
def test_every_configuration_compiles_with_an_older_triton(version: str, arch: int) -> None:
    if HAS_GPU and not folder(version).exists():
        pytest.skip("older Tritons are compiled where CI runs; tests/core/tritons.py installs them")
    kernels = [line for line in support_matrix.compile_all(arch, folder(version)) if "refused" not in line]
    assert kernels and {kernel["triton"] for kernel in kernels} == {version}, (
        f"tests/core/tritons.py installs {version}"
    )
    for kernel in kernels:
        check_fits(kernel, DEVICES[arch])
        # What serves Hopper by default spills a few words at most (3.8: 72 bytes in the paged logits of 128 rows); the
        # portable kernels' tiles are the newest Triton's.
        assert not kernel["kernel"].endswith("_sm90_kernel") or kernel["spilled_bytes"] <= 72, kernel


@pytest.mark.parametrize("arch", support_matrix.ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
def test_every_configuration_compiles(arch: int) -> None:
    require_assembler(arch)
    device = DEVICES[arch]
    lines = support_matrix.compile_all(arch)
    kernels = [line for line in lines if "refused" not in line]

    assert {line["op"] for line in lines} == set(registry()), "an op was not planned"
    for kernel in kernels:
        check_fits(kernel, device)
        # Those of sm_90, where tiles are measured, and sm_80, which has none of its own, stand in the matrix below.
        assert arch in (80, 90) or (kernel["spilled_bytes"] or 0) <= SPILLED.get((arch, kernel["kernel"]), 0), kernel

    # The committed matrix says the same; without its tool Triton does not tell what spills.
    told = all(kernel["spilled_bytes"] is not None for kernel in kernels)
    found = support_matrix.cells(lines)
    for key, cell in support_matrix.committed()[arch].items():
        assert found.pop(key, "no") == (cell if told else cell.partition(";")[0]), key
    assert set(found.values()) <= {"no"}, "docs/support.md is older than the ops"

    if arch == 90:
        by_hand = [kernel for kernel in kernels if kernel["kernel"].endswith("_sm90_kernel")]
        assert {(kernel["op"], kernel["block_h"]) for kernel in by_hand} >= {
            ("sparse_mla", 16), ("sparse_mla", 64), ("indexer_logits", 0), ("indexer_logits_paged", 0)
        }  # fmt: skip
        for kernel in by_hand:
            assert ("mma.sync" if kernel["block_h"] == 16 else "wgmma.mma_async") in kernel["mma"], kernel
        # A few words before and after the loops; inside them a spill costs more than all else, and takes more.
        spilled = [kernel["spilled_bytes"] for kernel in by_hand]
        assert all(not told if stack is None else stack <= 64 for stack in spilled), f"registers spill: {spilled}"

    for name, block_h in (("sparse_mla_kernel", 64), ("indexer_logits_kernel", 0), ("indexer_logits_paged_kernel", 0)):
        wide = NATIVE[arch] != "mma.sync"
        used = [set(k["mma"]) for k in kernels if k["kernel"] == name and (k["block_h"] >= block_h or not wide)]
        assert used or arch < MIN_E4M3_ARCH, f"no {name} for sm_{arch}"
        assert all(instructions for instructions in used), name
        assert not used or any(NATIVE[arch] in instructions for instructions in used), (name, used)
