"""The Gluon kernel for Hopper that selects by clusters: the portable kernels' indices, of any values."""

import jax
import kit
import numpy as np
import pytest
import torch
from hopper import NEEDS_INLINE_PTX, ON_HOPPER

from xmla import jax_api, torch_api
from xmla.core.op import Case
from xmla.core.ops.layer.dsa_attention.gluon_sm90.kernel import select_slots_cluster_sm90_kernel
from xmla.core.registry import registry

pytestmark = [*ON_HOPPER, NEEDS_INLINE_PTX]

OP = registry()["select_topk"]
BY_CLUSTERS = "topk_cluster_sm90_kernel"


def kernels(logits: torch.Tensor, ends: torch.Tensor, starts: torch.Tensor | None = None, k: int = 2048) -> list[str]:
    return [launch.name for launch in torch_api.select_topk.plan(logits, ends, starts, k=k).launches]


def agrees(logits: torch.Tensor, ends: torch.Tensor, starts: torch.Tensor | None = None, k: int = 2048) -> None:
    assert kernels(logits, ends, starts, k) == [BY_CLUSTERS]
    got = torch_api.select_topk(logits, ends, starts, k=k)
    want = torch_api.select_topk(logits, ends, starts, k=k, implementation="triton")
    wrong = (got != want).sum(1).tolist()
    assert not any(wrong), f"wrong indices by row: {wrong}"


def kinds(columns: int) -> torch.Tensor:
    """A row of each kind of values."""
    generator = torch.Generator("cuda").manual_seed(columns)

    def normal() -> torch.Tensor:
        return torch.randn(columns, device="cuda", generator=generator)

    place = torch.arange(columns, device="cuda")
    nan, outliers, infinite = torch.full_like(normal(), torch.nan), normal(), normal()
    nan[::100], outliers[:10] = 1, 1e20
    infinite[5], infinite[7], infinite[11] = torch.inf, -torch.inf, torch.nan
    sparse = torch.where(place % 4 == 0, 5.0, normal() - 100)
    sparse[7 * columns // 8] = 2.0000002
    return torch.stack([
        normal(), normal() + 100, torch.rand_like(nan), torch.ones_like(nan), place / columns, -place / columns,
        normal().round(), nan, infinite, torch.where(normal() < 0, 0.0, -0.0), normal() * 1e-40, outliers,
        torch.where(place % 3 == 0, 0.0, -torch.inf), 1.5 + normal() * 1e-4, sparse, normal().bfloat16().float(),
    ])  # fmt: skip


@pytest.mark.parametrize("columns", [2049, 3001, 4097, 8192, 16384, 20003, 32768, 65536, 100000, 131072])
def test_every_kind_of_values(columns: int) -> None:
    rows = 8 if columns > 65536 else 16
    generator = torch.Generator().manual_seed(columns)
    for logits in kinds(columns).split(rows):
        whole = torch.full((rows,), columns)
        shorter = torch.randint(2048, columns, (rows,), generator=generator)
        one_cta = torch.full((rows,), min(columns, 7 * 1024 + 1))
        for ends in (whole, shorter, one_cta, torch.arange(rows) * 200):
            agrees(logits, ends.int().cuda())
            agrees(logits, ends.int().cuda(), k=511)
        agrees(logits.bfloat16(), shorter.int().cuda())
        agrees(logits, whole.int().cuda(), torch.arange(rows, dtype=torch.int32, device="cuda") * 3 - 1)
        wide = torch.full((rows, columns + 5), torch.nan, device="cuda")
        wide[:, :columns] = logits
        agrees(wide[:, :columns], shorter.int().cuda())


@pytest.mark.parametrize("case", [case for case in OP.cases if case.attrs["k"] <= 2048], ids=kit.case_id)
def test_agrees_with_the_reference(case: Case) -> None:
    inputs = kit.make(case)
    (want,) = OP.reference(**inputs, **kit.attributes(OP, case))
    got = torch_api.select_topk(*kit.torch_inputs(OP, kit.copies(inputs), "cuda"), **case.attrs)
    assert np.array_equal(got.cpu().numpy(), want)
    by_jax = jax_api.select_topk(*(None if a is None else jax.numpy.asarray(a) for a in map(inputs.get, OP.tensors)),
                                 **case.attrs)  # fmt: skip
    assert np.array_equal(np.asarray(by_jax), want)


def test_a_graph_and_many_calls() -> None:
    """Clusters are launched by the kernel's own directive: eagerly, from a graph, by XLA."""
    logits = torch.randn(8, 65536, device="cuda")
    ends = torch.full((8,), 65536, dtype=torch.int32, device="cuda")
    want = torch_api.select_topk(logits, ends, k=2048, implementation="triton")
    assert kernels(logits, ends) == [BY_CLUSTERS]
    out = torch.empty_like(want)
    torch_api.select_topk(logits, ends, k=2048, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch_api.select_topk(logits, ends, k=2048, out=out)
    for _ in range(50):
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, want)
    jitted = jax.jit(lambda x, e: jax_api.select_topk(x, e, k=2048))
    assert np.array_equal(np.asarray(jitted(logits.cpu().numpy(), ends.cpu().numpy())), want.cpu().numpy())


def test_dsa_attention_maps_in_the_cluster() -> None:
    op = registry()["dsa_attention"]
    for case in op.cases:
        inputs = kit.torch_inputs(op, kit.make(case), "cuda")
        plan = torch_api.dsa_attention.plan(*inputs, **case.attrs)
        if any(launch.kernel is select_slots_cluster_sm90_kernel for launch in plan.launches):
            first, second = (torch_api.dsa_attention(*inputs, **case.attrs) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            return
    pytest.fail("no case of few rows")
