"""Every kernel configuration compiles for every architecture, without its hardware, and fits the part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import triton
from conftest import HAS_GPU, require_assembler

from tools import compile_unknown, support_matrix
from tools.compile_plans import DEVICES, joined_pairs
from tools.kept import MATRIX, OLD, file_of, keep, old
from tools.releases import SERVED, folder
from xmla.core.registry import registry
from xmla.core.values import Device

OLDER = SERVED["triton"]
TENSOR_MEMORY_COLUMNS = 512
GLUON = ("_sm90_kernel", "_sm100_kernel", "_sm120_kernel")  # how the kernels for one architecture are called
WITHOUT_PRODUCTS = {"topk_rows_sm90_kernel", "topk_cluster_sm90_kernel", "select_slots_cluster_sm90_kernel"}
# Bytes with Triton 3.9; the registers of many rows of select_topk, measured on sm_90.
SPILLED = {(89, "topk_candidates_kernel"): 8, (89, "sparse_mla_dcache_any_order_kernel"): 8}
SPILLED |= {(arch, "sparse_mla_sm100_kernel"): 32 for arch in (100, 103)}
SPILLED |= {(arch, "indexer_logits_paged_sm100_kernel"): 16 for arch in (100, 103)}
SPILLED |= {(arch, "indexer_logits_paged_kernel"): 56 for arch in (100, 103)}  # two tokens of MXFP4 keys
# One assembler of a pair spills where the other has registers left: loss of 17 keys, V4's two sources of 70 heads.
SPILLED |= {(103, "indexer_loss_kernel"): 8, (121, "sparse_mla_sm120_kernel"): 24}
# Of kernels for Hopper, which are to have a few words at most, with Triton 3.9 and with older ones: here in the warps
# that gather, which wait for others.
SPILLED_ON_HOPPER = {"sparse_mla_backward_sm90_kernel": (112, 64)}
SPILLED_ON_HOPPER |= {"sparse_mla_backward_any_order_sm90_kernel": (112, 112)}
# Bytes of copies of scales: one a key, or V4's 8.
OTHER_COPIES = {"indexer_logits_paged_sm90_kernel": {4}, "indexer_block_logits_sm90_kernel": {4}}
OTHER_COPIES |= {"indexer_block_logits_paged_sm90_kernel": {4}}
OTHER_COPIES |= {"sparse_mla_sm120_kernel": {8}}
# Rows of select_topk that fill the machine, 32 elements a thread: where rows are searched by keys.
SPILLED_ON_HOPPER |= dict.fromkeys(("topk_cluster_sm90_kernel", "select_slots_cluster_sm90_kernel"), (200, 200))
NATIVE = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 103: "tcgen05.mma",
          120: "mma.sync", 121: "mma.sync"}  # fmt: skip


def check_fits(kernel: support_matrix.Line, device: Device) -> None:
    assert kernel["cubin_bytes"] > 0, kernel
    assert kernel["shared"] <= device.smem_bytes, kernel
    assert kernel["tensor_memory"] <= TENSOR_MEMORY_COLUMNS, kernel
    assert not kernel["trap"], kernel
    assert kernel["serialized"] is None, kernel
    assert kernel["joined_pairs"] == [], kernel
    assert kernel["keys_early"] in (None, kernel["copies_early"]), kernel
    assert kernel["ptx"] <= 8.8, "JAX assembles with its own ptxas, which may be of CUDA 12.9"
    # Rows come by 16 bytes, though the compiler does not see their alignment: by 4 attention takes a fifth longer.
    if kernel["kernel"].endswith(GLUON):
        others = OTHER_COPIES.get(kernel["kernel"], set())
        assert set(kernel["copies"]) <= {16} | others, kernel
        assert kernel["reused_barriers"] == [], kernel
    # Operands of mma.sync by ldmatrix, and packed entries copied a tile ahead: else the compiler takes the operands for
    # bytes (`lang.numbers.hidden`). Portable kernels for Hopper do not hide them.
    if kernel["mma"] == ["mma.sync"] and kernel["kernel"].startswith(("sparse_mla", "indexer_logits", "indexer_topk")):
        assert kernel["ldmatrix"] or device.arch == 90, kernel
        assert kernel["copied_bytes"] >= 2 * kernel["tile_bytes"] or device.arch == 90, kernel


# Digests of the kernels that passed, of their sources and what they are compiled for, are kept. Of a function that has
# another digest one kernel is compiled for each of Triton's code generators, and a sample of others. The remaining
# architectures share such functions, as those generators do with an older Triton: the rest is left to `make matrix`,
# which is run after every change of a kernel, compiles all and writes the digests. With the newest Triton PTX for an
# architecture with another's code generator is taken from there and assembled; with older ones it differs.
GENERATORS = (90, 100, 120)  # wgmma, tcgen05 and mma.sync
OTHERS = tuple(arch for arch in support_matrix.ARCHITECTURES if arch not in GENERATORS)
SAME_GENERATOR = {103: 100, 121: 120}
# The first of a pair leaves its PTX in Triton's cache for the second.
CONFIGURATIONS = [
    pytest.param(
        version, arch, id=f"{version}-sm_{arch}" if version in OLDER else f"sm_{arch}",
        marks=[] if version in OLDER else pytest.mark.xdist_group(f"sm_{SAME_GENERATOR.get(arch, arch)}"),
    )
    for version in (triton.__version__, *OLDER)
    for arch in (GENERATORS if version in OLDER and not MATRIX else support_matrix.ARCHITECTURES)
]  # fmt: skip


@contextmanager
def compiled(
    version: str, arch: int, record_property: Callable[[str, object], None]
) -> Iterator[tuple[list[support_matrix.Line], list[support_matrix.Line]]]:
    """All lines of an architecture, and those of kernels that were compiled; if the checks of the body pass,
    `make matrix` writes the digests."""
    check = f"triton-{version}-sm_{arch}"
    other = folder("triton", version) if version in OLDER else None
    options = ["--as", str(SAME_GENERATOR[arch])] if arch in SAME_GENERATOR and not other else []
    if not MATRIX:
        sharing = (arch,) if arch in GENERATORS and not other else GENERATORS if other else OTHERS
        options += ["--some", f"{sharing.index(arch)}/{len(sharing)}"]
    digests, lines = support_matrix.compile_all(arch, *options, triton=other, but=file_of(check))
    record_property(OLD, old(check, digests))
    kernels = [line for line in lines if "cubin_bytes" in line]
    assert kernels and {kernel["triton"] for kernel in kernels} == {version}, f"Triton {version} is expected"
    yield lines, kernels
    keep(check, digests)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "arch"), CONFIGURATIONS)
def test_every_configuration_compiles(version: str, arch: int, record_property: Callable[[str, object], None]) -> None:
    if version in OLDER and HAS_GPU and not folder("triton", version).exists():
        pytest.skip("older Tritons are compiled where CI runs; tools/releases.py installs them")
    require_assembler(arch)
    with compiled(version, arch, record_property) as (lines, kernels):
        assert {line["op"] for line in lines} == set(registry()), "an op was not planned"
        if arch in SAME_GENERATOR and version not in OLDER:
            compared = {line["kernel"]: line["same_ptx"] for line in kernels if "same_ptx" in line}
            assert compared.keys() == {line["kernel"] for line in kernels} and all(compared.values()), compared
        for kernel in kernels:
            check_fits(kernel, DEVICES[arch])
        if version in OLDER:
            check_spills_of_an_older_triton(kernels)
            return
        for kernel in kernels:
            # Those of sm_90, where tiles are measured, and sm_80, which has none of its own, stand in docs/support.md.
            assert arch in (80, 90) or kernel["spilled_bytes"] <= SPILLED.get((arch, kernel["kernel"]), 0), kernel
        check_committed(arch, lines)
        left_out = {line["kernel"] for line in lines if "left_out" in line}
        check_products(arch, [kernel for kernel in kernels if kernel["kernel"] not in left_out], left_out)


def check_spills_of_an_older_triton(kernels: list[support_matrix.Line]) -> None:
    """What serves Hopper by default spills a few words at most; the portable kernels' tiles are the newest Triton's."""
    for kernel in kernels:  # 3.8: 72 bytes in the paged logits of 128 rows
        _, most = SPILLED_ON_HOPPER.get(kernel["kernel"], (64, 72))
        assert not kernel["kernel"].endswith("_sm90_kernel") or kernel["spilled_bytes"] <= most, kernel


@pytest.mark.parametrize(("high", "joined"), [("%rs3", True), ("%rs4", False)])
def test_a_pair_that_an_assembler_loses_is_found(high: str, joined: bool) -> None:
    """In seven instructions; a pair's second byte that other memory gives is not computed from it."""
    ptx = f"""
    ld.global.b16 %rs4, [%rd1];
    // begin inline asm
    {{ cvt.rn.satfinite.e4m3x2.f32 %rs1, %r2, %r1; }}
    // end inline asm
    @%p1 shr.u16 %rs3, %rs1, 8;
    mov.b32 %r3, {{%rs1, {high}}};
    mov.b32 {{%rs5, %rs6}}, %r3;
    st.global.b16 [%rd2], %rs5;"""
    assert bool(joined_pairs(ptx)) is joined


@pytest.mark.parametrize("arch", [107, 110], ids=lambda arch: f"sm_{arch}")
def test_architectures_younger_than_the_oldest_ptx_compile(arch: int) -> None:
    """Devices that are not known: one kernel stands for those that `KNOWN_DEVICES` would have compiled."""
    require_assembler(arch)
    (line,) = support_matrix.lines_of(Path(compile_unknown.__file__), str(arch))
    assert f".target sm_{arch}a" in line["ptx"] and NATIVE[100] in line["ptx"]
    assert DEVICES[120].smem_bytes < line["shared"] <= DEVICES[100].smem_bytes, "tiles are those of sm_100"


def check_committed(arch: int, lines: list[support_matrix.Line]) -> None:
    """docs/support.md says what the kernels do; of those that are left out, only that there are some."""
    found, committed = support_matrix.cells(lines), support_matrix.committed()[arch]
    planned = {(line["op"], line["form"]) for line in lines}
    for key in planned | committed.keys():
        cell = committed.get(key, "no")
        assert (found[key] == cell) if key in found else (key in planned) == (cell != "no"), (key, cell)


def check_products(arch: int, kernels: list[support_matrix.Line], left_out: set[str]) -> None:
    """Check functions compiled whole for the architecture's own tensor-core instructions, and for few spills."""
    gluon = [kernel for kernel in kernels if kernel["kernel"].endswith(GLUON)]
    if not {name for name in left_out if name.endswith(GLUON)}:
        hopper = {("sparse_mla", 16), ("sparse_mla", 64), ("indexer_logits", 0), ("indexer_logits_paged", 0)}
        everywhere = {90: hopper | {("sparse_mla_backward", 0)}, 120: {("sparse_mla", 16), ("sparse_mla", 32)}}
        everywhere[100] = {("sparse_mla", 64), ("indexer_logits_paged", 0)}
        used = {(kernel["op"], kernel["block_h"]) for kernel in gluon}
        assert used >= everywhere.get(SAME_GENERATOR.get(arch, arch), set())
    for kernel in gluon:
        assert (
            kernel["kernel"] in WITHOUT_PRODUCTS
            or ("mma.sync" if kernel["block_h"] in (16, 32) else NATIVE[arch]) in kernel["mma"]
        ), kernel
        # A few words before and after the loops; inside them a spill costs more than all else, and takes more.
        assert kernel["spilled_bytes"] <= SPILLED_ON_HOPPER.get(kernel["kernel"], (64, 72))[0], kernel

    for name, block_h in (("sparse_mla_kernel", 64), ("indexer_logits_kernel", 0), ("indexer_logits_paged_kernel", 0)):
        wide = NATIVE[arch] != "mma.sync"
        used = [set(k["mma"]) for k in kernels if k["kernel"] == name and (k["block_h"] >= block_h or not wide)]
        assert used or name in left_out, f"no {name} for sm_{arch}"
        assert all(instructions for instructions in used), name
        assert not used or any(NATIVE[arch] in instructions for instructions in used), (name, used)
